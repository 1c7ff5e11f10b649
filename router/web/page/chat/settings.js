// The settings of a chat: system prompt, sampling, and what new chats begin with.

import { el } from "../dom.js";
import { show } from "../dialogs.js";
import { FIELDS, valueOf } from "./sampling.js";

const DEFAULTS = "tandem.defaults";

/** What new chats begin with. */
export function defaults() {
  try {
    const { system = "", sampling = {} } = JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}");
    return { system: String(system), sampling };
  } catch {
    return { system: "", sampling: {} };
  }
}

/** Show the settings of `chat`; `changed` is called with each change of them. */
export function showSettings(chat, changed) {
  const system = el("textarea", { rows: 4, placeholder: "None" });
  system.value = chat.system;
  system.addEventListener("input", () => {
    chat.system = system.value;
    changed();
  });
  const fields = FIELDS.map(field => row(field, chat, changed));
  const buttons = el("div", { class: "buttons" },
    el("button", { class: "quiet", type: "button", onclick: () => reset() }, "Reset"),
    el("button", { type: "button", onclick: event => keep(event.target, chat) },
       "Use for new chats"));
  const dialog = show("Settings of this chat", "drawer", el("label", {}, "System prompt", system),
                      el("div", { class: "fields" }, fields), further(chat, changed), buttons);
  const reset = () => {
    chat.system = "";
    chat.sampling = {};
    changed();
    dialog.close();
    showSettings(chat, changed);
  };
}

function keep(button, { system, sampling }) {
  localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling }));
  button.textContent = "Kept for new chats";
}

function row(field, chat, changed) {
  const id = `setting-${field.name}`;
  const input = inputOf(field, id, chat.sampling[field.name]);
  input.addEventListener("input", () => {
    const valid = input.checkValidity();
    input.setAttribute("aria-invalid", String(!valid));
    if (valid) {
      chat.sampling[field.name] = valueOf(field, input);
      changed();
    }
  });
  const help = el("small", { id: `${id}-help` }, field.help);
  return el("div", { class: `field ${field.kind}` }, el("label", { for: id }, field.label), input,
            help);
}

function inputOf(field, id, value) {
  const about = { id, "aria-describedby": `${id}-help` };
  const { kind, min, max, options } = field;
  if (kind === "switch") return el("input", { ...about, type: "checkbox", checked: value === true });
  if (kind === "choice") {
    return el("select", about, options.map(option =>
      el("option", { value: option, selected: option === value }, option || "default")));
  }
  if (kind === "lines") {
    const area = el("textarea", { ...about, rows: 2 });
    area.value = Array.isArray(value) ? value.join("\n") : "";
    return area;
  }
  const input = el("input", { ...about, type: "number", min, max, placeholder: "default",
                              step: field.step === 1 ? 1 : "any", inputmode: "decimal" });
  input.value = value ?? "";
  return input;
}

/** Fields without an input of their own, as JSON: tools, response_format, logit_bias, … */
function further(chat, changed) {
  const area = el("textarea", { rows: 3, spellcheck: "false", id: "setting-more",
                                placeholder: '{"response_format": {"type": "json_object"}}' });
  area.value = chat.sampling.more ?? "";
  area.addEventListener("input", () => {
    area.setAttribute("aria-invalid", String(!isObject(area.value)));
    chat.sampling.more = area.value.trim();
    changed();
  });
  return el("label", {}, "Further fields of a request, as JSON", area);
}

function isObject(text) {
  try {
    return !text.trim() || (JSON.parse(text) ?? 0).constructor === Object;
  } catch {
    return false;
  }
}
