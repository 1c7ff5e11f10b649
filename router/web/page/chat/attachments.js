// Text files attached to a message. The model gets them below the typed text.

import { announce, el, iconButton } from "../dom.js";
import { number } from "../format.js";

// Characters over all files of a message; more than fits any context.
const MAX_CHARACTERS = 2_000_000;
const NAMES = { image: "an image", audio: "audio", video: "a video" };

export class Attachments {
  /** `warn` is called with an error message about a file. */
  constructor(warn) {
    this.warn = warn;
    this.files = [];
    this.input = el("input", { type: "file", multiple: true, hidden: true,
                               onchange: () => this.add([...this.input.files]) });
    this.button = iconButton("attach", "Attach text files", () => this.input.click());
    this.list = el("ul", { class: "attached", "aria-label": "Attached files", hidden: true });
  }

  /** Add files, except those that are not text or too large. */
  async add(files) {
    this.input.value = "";
    for (const file of files) {
      try {
        this.set([...this.files, await read(file, MAX_CHARACTERS - size(this.files))]);
        announce(`Attached ${file.name}`);
      } catch (error) {
        this.warn(error.message);
      }
    }
  }

  set(files) {
    this.files = files;
    this.list.hidden = !files.length;
    this.list.replaceChildren(...files.map(file => el("li", {}, labelOf(file),
      iconButton("close", `Remove ${file.name}`,
                 () => this.set(this.files.filter(other => other !== file))))));
  }
}

const size = files => files.reduce((sum, { text }) => sum + text.length, 0);

async function read(file, room) {
  const kind = file.type === "application/pdf" ? "a PDF" : NAMES[file.type.split("/")[0]];
  if (kind) throw new Error(`${file.name} is ${kind}; only text files can be attached.`);
  // UTF-8 has at most three bytes for each of JavaScript's UTF-16 units.
  if (file.size > 3 * room) throw tooMuch(file);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  if (text.length > room) throw tooMuch(file);
  return { name: file.name, text };
}

function tooMuch({ name }) {
  return new Error(`${name} is too large: the files of a message may have ` +
    `${number(MAX_CHARACTERS)} characters.`);
}

const labelOf = ({ name, text }) => `${name}, ${number(text.length)} characters`;

/** The files of a sent message. */
export function filesBox(files) {
  return files.map(file => el("details", { class: "call" }, el("summary", {}, labelOf(file)),
                              el("pre", { tabindex: "0" }, file.text)));
}
