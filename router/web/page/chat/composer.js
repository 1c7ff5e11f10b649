// The composer: a text, attached files, and the message that it edits, if any.

import { el, icon, relabel } from "../dom.js";
import { Attachments } from "./attachments.js";

export class Composer {
  /** `chat` sends the text, or stops the answer that it has to wait for. */
  constructor(chat) {
    this.chat = chat;
    this.drafts = new Map();  // drafts, by chat
    this.editing = null;  // the message that is edited
    this.field = el("textarea", { id: "message", rows: 1, "aria-label": "Message",
      placeholder: "Message", enterkeyhint: "send", oninput: () => this.grow(),
      onkeydown: event => this.onKey(event), onpaste: event => this.onPaste(event) });
    this.attachments = new Attachments(text => this.warn(text));
    this.button = el("button", { class: "send", "aria-label": "Send", title: "Send" }, icon("send"));
    this.banner = el("div", { class: "editing", hidden: true }, "Editing: the old version stays.",
                     el("button", { class: "quiet", type: "button", onclick: () => this.endEdit() },
                        "Cancel"));
    this.notice = el("p", { class: "notice", role: "alert", hidden: true });
    const onsubmit = event => {
      event.preventDefault();
      if (this.chat.busy) this.chat.stop();
      else this.chat.send();
    };
    const { button, input, list } = this.attachments;
    const form = el("form", { class: "composer", onsubmit }, button, input, this.field, this.button);
    this.nodes = [this.notice, this.banner, list, form];
  }

  get text() {
    return this.field.value.trim();
  }

  get files() {
    return this.attachments.files;
  }

  set(text, files = []) {
    this.field.value = text;
    this.attachments.set(files);
    this.grow();
  }

  /** Show a warning; an empty text removes it. */
  warn(text) {
    this.notice.textContent = text;
    this.notice.hidden = !text;
  }

  /** Show whether a message has to wait for an answer. */
  showBusy(busy) {
    this.button.classList.toggle("stop", busy);
    relabel(this.button, busy ? "stop" : "send", busy ? "Stop" : "Send");
  }

  /** Save the draft under a name. */
  keepDraft(name) {
    this.endEdit();
    const { value: text } = this.field, { files } = this;
    if (text || files.length) this.drafts.set(name, { text, files });
    else this.drafts.delete(name);
  }

  showDraft(name) {
    const { text, files } = this.drafts.get(name) ?? { text: "", files: [] };
    this.set(text, files);
  }

  edit(message) {
    this.editing = message;
    this.banner.hidden = false;
    this.set(message.text, message.files);
    this.chat.showRunning();
    this.field.focus();
  }

  endEdit() {
    if (!this.editing) return;
    this.editing = null;
    this.banner.hidden = true;
    this.set("");
    this.chat.showRunning();
  }

  onKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      this.chat.send();
    } else if (event.key === "ArrowUp" && !this.field.value) {
      event.preventDefault();
      this.chat.editLast();
    } else if (event.key === "Escape" && this.editing) {
      event.stopPropagation();  // Escape would also stop an answer
      this.endEdit();
    }
  }

  /** Attach pasted files. */
  onPaste(event) {
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    this.attach(files);
  }

  attach(files) {
    this.warn("");
    this.attachments.add([...files]);
    this.field.focus();
  }

  grow() {
    if (!this.field.offsetParent) return;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}
