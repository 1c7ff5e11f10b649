// The answers in progress, over all chats and tabs of this browser. They continue while another
// chat is shown, and other tabs show them too.

import { become } from "./conversation.js";

// Maximum over all tabs: a browser opens six connections to a server; the rest is for the page, and for
// streams of the cluster page.
export const MAX_ANSWERS = 3;
// Interval of reports to other tabs, which contain the whole text: longer for long answers.
const TELL_MS = 150, CHARACTERS_A_MS = 500;
// Interval of pings to tabs that stream. A tab that has missed this many is considered closed. (A lock
// would need no pings, but is not available over plain HTTP.)
const ASK_MS = 1_500, OPEN_QUESTIONS = 3;

const channel = new BroadcastChannel("tandem.tabs");

export class Answers {
  /** `follow` is called with the chat's id and the message when another tab's answer
   * begins (the last argument is true), grows, or has ended, and is no longer listed. */
  constructor(follow) {
    this.follow = follow;
    // By message id: the chat's id and the message. Answers of this tab also have their chat and a
    // controller; those of other tabs have their last report and the number of missed pings.
    this.answers = new Map();
    channel.addEventListener("message", ({ data }) => this.hear(data));
    // Closing the page interrupts its streams.
    addEventListener("pagehide", () => this.here().forEach(tellEnd));
    channel.postMessage({ kind: "ask" });
  }

  get count() {
    return this.answers.size;
  }

  /** Where a message is generated: "here", "elsewhere" (in another tab), or "" if it is not. */
  where({ id }) {
    const answer = this.answers.get(id);
    return !answer ? "" : answer.controller ? "here" : "elsewhere";
  }

  /** The answers of a chat. */
  inChat(id) {
    return [...this.answers.values()].filter(({ chatId }) => chatId === id);
  }

  /** The chat with this id if an answer of this tab changes it, otherwise undefined. */
  chat(id) {
    return this.here().find(({ chatId }) => chatId === id)?.chat;
  }

  here() {
    return [...this.answers.values()].filter(({ controller }) => controller);
  }

  elsewhere() {
    return [...this.answers.values()].filter(({ controller }) => !controller);
  }

  /** Update a chat with the answers of other tabs. */
  update(chat) {
    for (const { message } of this.inChat(chat.id)) {
      const ours = chat.messages[message.id];
      if (ours) become(ours, message);
    }
  }

  begin(chat, message) {
    const answer = { chatId: chat.id, chat, message, controller: new AbortController(), dropped: false,
                     savedAt: performance.now(), notifiedAt: -Infinity };
    this.answers.set(message.id, answer);
    return answer;
  }

  /** Report an answer of this tab to other tabs, unless that was done a moment ago. */
  report(answer) {
    const now = performance.now(), { text, reasoning = "" } = answer.message;
    const pause = TELL_MS + (text.length + reasoning.length) / CHARACTERS_A_MS;
    if (now - answer.notifiedAt < pause) return;
    answer.notifiedAt = now;
    tell("answering", answer);
  }

  /** End an answer of this tab. Once it is saved, `tellEnd` informs other tabs. */
  end({ message }) {
    this.answers.delete(message.id);
  }

  /** Stop an answer in any tab. */
  stop(message) {
    const { controller } = this.answers.get(message.id) ?? {};
    if (controller) controller.abort();
    else channel.postMessage({ kind: "stop", message: { id: message.id } });
  }

  /** Stop the answers of a deleted chat, without saving them. */
  drop(id) {
    for (const answer of this.here()) {
      if (answer.chatId !== id) continue;
      answer.dropped = true;
      answer.controller.abort();
    }
  }

  hear({ kind, chatId, message }) {
    if (kind === "ask") {
      for (const answer of this.here()) tell("answering", answer);
    } else if (this.where(message) === "here") {
      if (kind === "stop") this.stop(message);
    } else if (kind === "answering") {
      this.take(chatId, message);
    } else if (kind === "ended") {
      this.forget(chatId, message);
    }
  }

  take(chatId, message) {
    const begins = !this.answers.has(message.id);
    this.answers.set(message.id, { chatId, message, open: 0 });
    this.follow(chatId, message, begins);
    this.asking ??= setInterval(() => this.ask(), ASK_MS);
  }

  /** Ping other tabs; forget answers of tabs that no longer respond. */
  ask() {
    for (const answer of this.elsewhere()) {
      if (answer.open++ >= OPEN_QUESTIONS) this.forget(answer.chatId, answer.message);
    }
    channel.postMessage({ kind: "ask" });
  }

  forget(chatId, message) {
    this.answers.delete(message.id);
    this.follow(chatId, message, false);
    if (this.elsewhere().length) return;
    clearInterval(this.asking);
    this.asking = undefined;
  }
}

/** Inform other tabs that an answer of this tab has ended. */
export function tellEnd(answer) {
  tell("ended", answer);
}

function tell(kind, { chatId, message }) {
  message.revised = Date.now();
  channel.postMessage({ kind, chatId, message });
}
