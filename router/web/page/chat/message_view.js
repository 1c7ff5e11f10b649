// One message of the log: its text, reasoning, actions and figures.

import { copyButton, el, framed, iconButton } from "../dom.js";
import { number, seconds } from "../format.js";
import { MarkdownView } from "../markdown/render.js";
import { canContinue } from "./answer.js";
import { filesBox } from "./attachments.js";
import { CallsView, decisionBox, resultBox } from "./calls_view.js";
import { siblings } from "./conversation.js";
import { canShorten } from "./shorten.js";

const NAMES = { user: "You", tool: "Result of a call", approval: "Decision about a call" };
// By the reason of an answer's end.
const NOTES = {
  stopped: "Stopped.",
  length: "Stopped at the token limit.",
  interrupted: "Incomplete: the tab was closed before the answer had ended.",
};

/** `actions` is the chat view, which has the chat and the actions of messages. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.running = "";  // where it is generated: "here", or "elsewhere" in another tab
    this.markdown = new MarkdownView();
    this.reasoning = reasoningBox();
    this.isLast = false;  // on the shown path
    this.calls = new CallsView(results => actions.giveResults(message, results),
                               decisions => actions.decide(message, decisions));
    this.notes = el("div", { class: "notes" });
    this.bar = el("footer");
    // Created once: clicks on an element that each token replaces would be lost.
    this.stopButton = iconButton("stop", "Stop this answer", () => actions.stop(message));
    this.where = el("span", { class: "note" }, "Generating in another tab");
    const name = NAMES[message.role] ?? "Answer";
    this.node = el("article", { class: message.role, "aria-label": name, tabindex: "-1" });
    this.node.dataset.id = message.id;
    this.refresh = framed(() => this.show());
    this.show();
  }

  set state(running) {
    if (this.running === running) return;
    this.running = running;
    this.show();
  }

  show() {
    const { message } = this;
    this.node.classList.toggle("running", !!this.running);
    if (message.role === "user") {
      const text = message.text ? [el("div", { class: "bubble" }, message.text)] : [];
      this.node.replaceChildren(...filesBox(message.files ?? []), ...text, this.showBar());
      return;
    }
    const box = { tool: resultBox, approval: decisionBox }[message.role];
    if (box) {
      if (!this.node.firstChild) this.node.append(box(message));
      return;
    }
    if (!this.node.firstChild) {
      const { reasoning, markdown, calls, notes, bar } = this;
      this.node.append(reasoning.node, calls.ran, markdown.node, calls.node, notes, bar);
    }
    this.reasoning.show(message, this.running);
    this.markdown.show(message.text);
    this.showCalls();
    this.showNotes();
    this.showBar();
  }

  /** Set whether it is the last shown message. */
  set last(isLast) {
    if (this.isLast === isLast) return;
    this.isLast = isLast;
    this.showCalls();
    if (this.message.role === "assistant") this.showNotes();
  }

  /** Calls without results need them if no message follows. */
  showCalls() {
    this.calls.show(this.message, this.isLast && !this.running);
  }

  showNotes() {
    const { error, ended } = this.message;
    const notes = [];
    if (this.running && !this.message.text && !this.message.reasoning) {
      notes.push(el("p", { class: "waiting", "aria-label": "Waiting for the first token" },
                    el("i"), el("i"), el("i")));
    }
    const note = this.running ? "" : NOTES[ended];
    if (note) notes.push(el("p", { class: "note" }, note, this.buttonToContinue()));
    if (error && !this.running) notes.push(this.errorBox(error));
    this.notes.replaceChildren(...notes);
  }

  errorBox({ message, status, code, until }) {
    const retry = el("button", { type: "button", onclick: () => this.actions.retry(this.message) });
    countDown(retry, until);
    const tooLong = code === "context_length_exceeded" && canShorten(this.actions.chat, this.message.parent);
    const buttons = tooLong ? [this.buttonToShorten()] : [this.buttonToContinue(), retry];
    return el("div", { class: "error", role: "alert" },
              el("p", {}, el("strong", {}, headOf(status)), " ", message),
              el("span", { class: "buttons" }, buttons));
  }

  buttonToShorten() {
    const onclick = async ({ target }) => {
      target.disabled = true;
      await this.actions.shorten(this.message);
      target.disabled = false;
    };
    return el("button", { type: "button", onclick }, "Answer without the oldest messages");
  }

  /** Null if the answer cannot be continued. */
  buttonToContinue() {
    if (!this.isLast || !canContinue(this.actions.chat, this.message)) return null;
    return el("button", { type: "button", class: "quiet",
                          onclick: () => this.actions.goOn(this.message) }, "Continue");
  }

  showBar() {
    const { message, actions, bar } = this;
    if (this.running) {
      if (bar.firstChild !== this.stopButton) bar.replaceChildren(this.stopButton, this.where);
      this.where.hidden = this.running === "here";
      return bar;
    }
    const isUser = message.role === "user";
    if (message.error && !message.text) {  // only "Try again" applies
      bar.replaceChildren(...this.versions());
      return bar;
    }
    const more = isUser ? iconButton("edit", "Edit", () => actions.composer.edit(message)) :
      iconButton("again", "Answer again", () => actions.again(message));
    bar.replaceChildren(...this.versions(), copyButton("Copy", () => message.text), more,
                        ...(isUser ? [] : figures(message)));
    return bar;
  }

  versions() {
    const all = siblings(this.actions.chat, this.message);
    if (all.length < 2) return [];
    const at = all.indexOf(this.message);
    const step = (by, name, shape) => iconButton(
      shape, name, () => this.actions.step(by, this.message), { disabled: !all[at + by] });
    return [el("span", { class: "versions", role: "group", "aria-label": "Versions" },
               step(-1, "Version before", "left"), el("span", {}, `${at + 1}/${all.length}`),
               step(1, "Next version", "right"))];
  }
}

function reasoningBox() {
  const summary = el("summary");
  const view = new MarkdownView();
  const node = el("details", { class: "reasoning", hidden: true }, summary, view.node);
  let text = "";
  const fill = () => node.open && view.show(text);
  node.addEventListener("toggle", fill);
  return {
    node,
    show(message, running) {
      text = message.reasoning ?? "";
      node.hidden = !text;
      const thinking = running && !message.text;
      node.classList.toggle("thinking", thinking);
      const spent = message.thought ? `Thought for ${duration(message.thought)}` : "Thoughts";
      const title = thinking ? "Thinking…" : spent;
      if (summary.textContent !== title) summary.textContent = title;
      fill();
    },
  };
}

function headOf(status) {
  switch (status) {
    case 0: return "Connection lost.";
    case 401: return "A key is needed.";
    case 429: return "Too many requests.";
    case 503: return "The server is unavailable.";
    default: return status >= 500 ? "The server failed." : "The server rejected the request.";
  }
}

/** Disable a button until the time that the server has set. */
function countDown(button, until) {
  const left = Math.ceil(((until ?? 0) - Date.now()) / 1000);
  button.disabled = left > 0;
  button.textContent = left > 0 ? `Try again in ${seconds(left)}` : "Try again";
  if (left > 0) setTimeout(() => countDown(button, until), 1000);
}

/** The speed of an answer, and the nodes that generated it. */
function figures({ stats, model }) {
  if (!stats) return [];
  const { first, rate, tokens, prompt, cached, remote, prefill, decode } = stats;
  const text = [`first token ${duration(first)}`, rate ? `${number(rate, 1)} tokens/s` : null,
                `${number(tokens)} tokens`].filter(Boolean).join(" · ");
  const where = prefill ? `${number(remote)} of them prefilled by ${prefill}` :
    "prefilled where it was decoded";
  const details = `${model ? `${model}: ` : ""}${number(prompt)} prompt tokens` +
    `${cached ? `, ${number(cached)} cached` : ""}; ${where}` + (decode ? `; decoded by ${decode}` : "");
  return [el("span", { class: "figures", title: prompt ? details : null }, text,
             prefill ? el("span", { class: "via" }, ` · KV from ${prefill}`) : null)];
}

const duration = value => seconds(value, value < 10 ? 2 : 0);
