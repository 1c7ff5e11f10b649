// The settings of a chat: system prompt, sampling, and what new chats begin with.

import { el } from "../dom.js";
import { show } from "../dialogs.js";
import { FIELDS, problemOf, valueOf } from "./sampling.js";

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

/** Show the settings of `chat`, and the model's defaults where they are empty; `changed` is called with
 * each change of them. */
export function showSettings(chat, modelDefaults, changed) {
  const system = el("textarea", { rows: 4, placeholder: "None" });
  system.value = chat.system;
  system.addEventListener("input", () => {
    chat.system = system.value;
    changed();
  });
  const fields = FIELDS.map(field => row(field, chat, modelDefaults[field.name], changed));
  const buttons = el("div", { class: "buttons" },
    el("button", { class: "quiet", type: "button", onclick: () => reset() }, "Reset"),
    el("button", { type: "button", onclick: event => keep(event.target, chat) },
       "Use for new chats"));
  const dialog = show("Settings of this chat", "drawer", el("label", {}, "System prompt", system),
                      el("p", { class: "note" }, "An empty field has the value that it shows in grey."),
                      el("div", { class: "fields" }, fields), further(chat, changed), buttons);
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
  button.textContent = "Kept for new chats";
}

function row(field, chat, modelDefault, changed) {
  const id = `setting-${field.name}`;
  const input = inputOf(field, id, chat.sampling[field.name], modelDefault ?? field.otherwise);
  const problem = checked(input, () => problemOf(field, input), () => {
    chat.sampling[field.name] = valueOf(field, input);
    changed();
  });
  const help = el("small", { id: `${id}-help` }, field.help);
  return el("div", { class: `field ${field.kind}` }, el("label", { for: id }, field.label), input,
            problem, help);
}

/** Call `take` with each valid input; returns what shows what is wrong with another one. */
function checked(input, problemOf, take) {
  const problem = el("small", { id: `${input.id}-problem`, class: "problem", role: "alert" });
  input.addEventListener("input", () => {
    problem.textContent = problemOf();
    input.setAttribute("aria-invalid", String(!!problem.textContent));
    if (!problem.textContent) take();
  });
  return problem;
}

function inputOf(field, id, value, otherwise) {
  const about = { id, "aria-describedby": `${id}-problem ${id}-help` };
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
  const input = el("input", { ...about, type: "number", min, max, placeholder: otherwise,
                              step: field.step === 1 ? 1 : "any", inputmode: "decimal" });
  input.value = value ?? "";
  return input;
}

/** Fields without an input of their own, as JSON: tools, response_format, logit_bias, … */
function further(chat, changed) {
  const area = el("textarea", { rows: 3, spellcheck: "false", id: "setting-more",
                                "aria-describedby": "setting-more-problem",
                                placeholder: '{"response_format": {"type": "json_object"}}' });
  area.value = chat.sampling.more ?? "";
  const wrong = () => (isObject(area.value) ? "" : "This is not a JSON object.");
  const problem = checked(area, wrong, () => {
    chat.sampling.more = area.value.trim();
    changed();
  });
  return el("div", { class: "field" },
            el("label", { for: area.id }, "Further fields of a request, as JSON"), area, problem);
}

function isObject(text) {
  try {
    return !text.trim() || (JSON.parse(text) ?? 0).constructor === Object;
  } catch {
    return false;
  }
}
