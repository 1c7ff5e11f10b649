// The calls of tools in an answer, and a form for the results of those that the client runs.

import { el } from "../dom.js";
import { highlighted } from "../markdown/highlight.js";
import { inWords } from "./conversation.js";

export class CallsView {
  /** `answered` gets the results of all calls, in their order, and `decided` the calls that wait,
   * each with `approve`. */
  constructor(answered, decided) {
    this.answered = answered;
    this.decided = decided;
    this.ran = el("div", { class: "calls" });  // stands before the text, which came of it
    this.node = el("div", { class: "calls" });
  }

  /** Show the calls of a message; `open` if results or decisions are awaited. */
  show({ calls = [], ran = [], approvals = [] }, open) {
    const key = JSON.stringify([calls, ran, approvals, open]);
    if (this.key === key) return;
    this.key = key;
    const made = calls.filter(Boolean);
    this.ran.replaceChildren(...ran.map(ranBox));
    this.node.replaceChildren(...made.map(callBox), ...approvals.map(askedBox));
    if (open && made.length) this.node.append(this.resultForm(made));
    if (open && approvals.length) this.node.append(this.approvalForm(approvals));
  }

  /** Buttons for each call; the decisions are made when all calls have one. */
  approvalForm(approvals) {
    const rows = approvals.map(call => decisionRow(call, () => {
      const decisions = approvals.map((call, i) => ({ ...call, approve: rows[i].choice() }));
      if (decisions.every(({ approve }) => approve !== null)) this.decided(decisions);
    }));
    return el("div", { class: "decisions" }, rows.map(row => row.node));
  }

  resultForm(calls) {
    const fields = calls.map(({ name }) =>
      el("textarea", { rows: 2, spellcheck: "false", "aria-label": `Result of ${name}`,
                       placeholder: `Result of ${name}` }));
    const send = el("button", { type: "submit" }, "Send the result" + (calls.length > 1 ? "s" : ""));
    const form = el("form", { class: "results-of-calls" }, fields, send);
    form.addEventListener("submit", event => {
      event.preventDefault();
      this.answered(fields.map(field => field.value));
    });
    return form;
  }
}

function callBox({ name, text }) {
  return el("details", { class: "call", open: true },
            el("summary", {}, "Calls ", el("b", {}, name || "…")),
            code(`Arguments of ${name}`, pretty(text), "json"));
}

/** A call that the router has run. */
function ranBox({ server, name, text, output, failed }) {
  const title = server ? `${server}: ${name}` : name;
  return el("details", { class: "call" },
            el("summary", {}, failed ? "Failed: " : "Ran ", el("b", {}, title)),
            code(`Arguments of ${title}`, pretty(text), "json"),
            code(`Result of ${title}`, pretty(output), "json"));
}

/** A call that waits for the user. */
function askedBox({ server, name, text }) {
  return el("details", { class: "call", open: true },
            el("summary", {}, "Asks to run ", el("b", {}, `${server}: ${name}`)),
            code(`Arguments of ${name}`, pretty(text), "json"));
}

function decisionRow({ server, name }, changed) {
  let choice = null;
  const button = (label, value, kind) => el("button", { type: "button", class: kind,
    "aria-label": `${label} ${server}: ${name}`, "aria-pressed": "false",
    onclick: () => choose(value) }, label);
  const buttons = [button("Allow", true, null), button("Deny", false, "quiet")];
  const choose = value => {
    choice = value;
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(value === (i === 0))));
    changed();
  };
  return { node: el("div", {}, buttons, el("span", { class: "note" }, `${server}: ${name}`)),
           choice: () => choice };
}

/** What the user has decided, as a message of its own. */
export function decisionBox({ decisions }) {
  return el("p", { class: "note" }, inWords(decisions));
}

/** The result of a call, as a message of its own. */
export function resultBox({ name, text }) {
  const title = name || "a call";
  return el("details", { class: "call" }, el("summary", {}, "Result of ", el("b", {}, title)),
            code(`Result of ${title}`, pretty(text), "json"));
}

function code(name, text, language) {
  return el("pre", { tabindex: "0", role: "region", "aria-label": name },
            el("code", {}, highlighted(text, language)));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
