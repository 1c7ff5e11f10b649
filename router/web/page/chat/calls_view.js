// The tool calls of an answer, with a form for the results of calls that the client runs.

import { el } from "../dom.js";
import { highlighted } from "../markdown/highlight.js";
import { inWords, toolOf } from "./conversation.js";

export class CallsView {
  /** `answered` is called with the results of all calls, in order, and `decided` with the calls that
   * needed approval, each with `approve`. */
  constructor(answered, decided) {
    this.answered = answered;
    this.decided = decided;
    this.ran = el("div", { class: "calls" });  // shown before the text that followed
    this.node = el("div", { class: "calls" });
  }

  /** Show the calls of a message; `open` if they need results or decisions. */
  show({ calls = [], ran = [], approvals = [] }, open) {
    const key = JSON.stringify([calls, ran, approvals, open]);
    if (this.key === key) return;
    this.key = key;
    const present = calls.filter(Boolean);
    this.ran.replaceChildren(...ran.map(ranBox));
    this.node.replaceChildren(...present.map(calledBox), ...approvals.map(askedBox));
    if (open && present.length) this.node.append(this.resultForm(present));
    if (open && approvals.length) this.node.append(this.approvalForm(approvals));
  }

  /** Buttons for each call. The decisions are sent once all calls have one. */
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

/** A call: its state, its tool, and texts by their titles. */
function callBox(verb, tool, texts, open = false) {
  return el("details", { class: "call", open }, el("summary", {}, `${verb} `, el("b", {}, tool)),
            Object.entries(texts).map(([what, text]) => code(`${what} of ${tool}`, pretty(text))));
}

const calledBox = ({ name, text }) => callBox("Calls", name || "…", { Arguments: text }, true);

/** A call that the router ran. */
const ranBox = call => callBox(call.failed ? "Failed:" : "Ran", toolOf(call),
                               { Arguments: call.text, Result: call.output });

/** A call that needs the user's approval. */
const askedBox = call => callBox("Asks to run", toolOf(call), { Arguments: call.text }, true);

function decisionRow(call, changed) {
  const tool = toolOf(call);
  let choice = null;
  const button = (label, value, kind) => el("button", { type: "button", class: kind,
    "aria-label": `${label} ${tool}`, "aria-pressed": "false",
    onclick: () => choose(value) }, label);
  const buttons = [button("Allow", true, null), button("Deny", false, "quiet")];
  const choose = value => {
    choice = value;
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(value === (i === 0))));
    changed();
  };
  return { node: el("div", {}, buttons, el("span", { class: "note" }, tool)),
           choice: () => choice };
}

/** The user's decisions, as a message. */
export function decisionBox({ decisions }) {
  return el("p", { class: "note" }, inWords(decisions));
}

/** The result of a call, as a message. */
export function resultBox({ name, text }) {
  return callBox("Result of", name || "a call", { Result: text });
}

function code(name, text) {
  return el("pre", { tabindex: "0", role: "region", "aria-label": name },
            el("code", {}, highlighted(text, "json")));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
