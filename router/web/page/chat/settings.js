// The settings of a chat: system prompt, sampling, and the defaults of new chats.

import { el } from "../dom.js";
import { show } from "../dialogs.js";
import { FIELDS } from "./sampling.js";

const DEFAULTS = "tandem.defaults";
// Fields without an input of their own: tools, response_format, logit_bias, …
const FURTHER = { kind: "json", name: "more", label: "Further fields of a request, as JSON" };

/** The settings of new chats. */
export function defaults() {
  try {
    const { system = "", sampling = {} } = JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}");
    return { system: String(system), sampling };
  } catch {
    return { system: "", sampling: {} };
  }
}

/** Show the settings of `chat`, and the model's defaults where they are empty; `changed` is called with
 * each change. */
export function showSettings(chat, modelDefaults, changed) {
  const onSystem = ({ target }) => {
    chat.system = target.value;
    changed();
  };
  const system = el("textarea", { rows: 4, placeholder: "None", oninput: onSystem }, chat.system);
  const fields = FIELDS.map(field => row(field, chat, modelDefaults[field.name], changed));
  const buttons = el("div", { class: "buttons" },
    el("button", { class: "quiet", type: "button", onclick: () => reset() }, "Reset"),
    el("button", { type: "button", onclick: event => keep(event.target, chat) },
       "Use for new chats"));
  const dialog = show("Settings of this chat", "drawer", el("label", {}, "System prompt", system),
                      el("p", { class: "note" }, "An empty field uses the value shown in grey."),
                      el("div", { class: "fields" }, fields),
                      row(FURTHER, chat, "", changed), buttons);
  const reset = () => {
    chat.system = "";
    chat.sampling = {};
    changed();
    dialog.close();
    showSettings(chat, modelDefaults, changed);
  };
}

function keep(button, { system, sampling }) {
  localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling }));
  button.textContent = "Saved for new chats";
}

function row(field, chat, modelDefault, changed) {
  const { name, label, kind, help } = field;
  const id = `setting-${name}`;
  const { make, value, problem } = KINDS[kind];
  const input = make(field, { id, "aria-describedby": `${id}-problem ${id}-help` },
                     chat.sampling[name], modelDefault ?? field.otherwise);
  const wrong = el("small", { id: `${id}-problem`, class: "problem", role: "alert" });
  input.addEventListener("input", () => {
    wrong.textContent = problem?.(field, input) ?? "";
    input.setAttribute("aria-invalid", String(!!wrong.textContent));
    if (wrong.textContent) return;
    chat.sampling[name] = value(input);
    changed();
  });
  return el("div", { class: `field ${kind}` }, el("label", { for: id }, label), input, wrong,
            el("small", { id: `${id}-help` }, help));
}

// By the kind of a field: its input, its error message, and its value in a request, or null if it is
// left out.
const KINDS = {
  number: {
    make: ({ min, max, step }, about, value, otherwise) =>
      el("input", { ...about, type: "number", min, max, step: step === 1 ? 1 : "any", value,
                    placeholder: otherwise, inputmode: "decimal" }),
    value: input => (input.value === "" ? null : Number(input.value)),
    problem: problemOfNumber,
  },
  lines: {
    make: (_, about, value) =>
      el("textarea", { ...about, rows: 2 }, Array.isArray(value) ? value.join("\n") : ""),
    value: input => (input.value ? input.value.split("\n").filter(line => line) : null),
  },
  choice: {
    make: ({ options }, about, value) => el("select", about, options.map(option =>
      el("option", { value: option, selected: option === value }, option || "default"))),
    value: input => input.value || null,
  },
  switch: {
    make: (_, about, value) =>
      el("input", { ...about, type: "checkbox", checked: value === true }),
    value: input => input.checked || null,
  },
  json: {
    make: (_, about, value) =>
      el("textarea", { ...about, rows: 3, spellcheck: "false",
                       placeholder: '{"response_format": {"type": "json_object"}}' }, value),
    value: input => input.value.trim() || null,
    problem: (_, input) => (isObject(input.value) ? "" : "This is not a JSON object."),
  },
};

function problemOfNumber({ label, min, max }, { validity }) {
  if (validity.badInput) return `${label} is a number.`;
  if (validity.stepMismatch) return `${label} is a whole number.`;
  if (validity.rangeUnderflow) return `${label} is ${min} or more.`;
  return validity.rangeOverflow ? `${label} is ${max} or less.` : "";
}

function isObject(text) {
  try {
    return !text.trim() || (JSON.parse(text) ?? 0).constructor === Object;
  } catch {
    return false;
  }
}
