// The answers that are being streamed, in whichever chat and tab of this browser: they go on while
// another chat is shown, and the other tabs show them as they grow.

import { become } from "./conversation.js";

// At once, in all tabs: a browser opens six connections to a server; the rest is for the page, and the
// streams of the cluster page.
export const MAX_ANSWERS = 3;
// Between two states of an answer, which are told whole: a long one is told less often.
const TELL_MS = 150, CHARACTERS_A_MS = 500;
// Tabs that stream are asked this often; one that has left so many questions open is gone. (A lock
// would say so without questions, but pages over plain HTTP have none.)
const ASK_MS = 1_500, OPEN_QUESTIONS = 3;

const channel = new BroadcastChannel("tandem.tabs");

export class Answers {
  /** `follow` is called with the id of the chat and the message of each answer of another tab that
   * begins (as the last argument says), grows, or has ended: then it is no longer here. */
  constructor(follow) {
    this.follow = follow;
    // By the message's id: the id of its chat, and the message. Answers of this tab have their chat and
    // a controller as well; of another tab, what it told last, and the number of open questions.
    this.answers = new Map();
    channel.addEventListener("message", ({ data }) => this.hear(data));
    // The page is closed, and what it streams breaks off.
    addEventListener("pagehide", () => this.here().forEach(tellEnd));
    channel.postMessage({ kind: "ask" });
  }

  get count() {
    return this.answers.size;
  }

  /** Where a message is being written: "here", or "elsewhere" in another tab; empty if it is not. */
  where({ id }) {
    const answer = this.answers.get(id);
    return !answer ? "" : answer.controller ? "here" : "elsewhere";
  }

  /** The answers of a chat. */
  inChat(id) {
    return [...this.answers.values()].filter(({ chatId }) => chatId === id);
  }

  /** The chat with this id as answers of this tab change it; undefined if it has none. */
  chat(id) {
    return this.here().find(({ chatId }) => chatId === id)?.chat;
  }

  here() {
    return [...this.answers.values()].filter(({ controller }) => controller);
  }

  elsewhere() {
    return [...this.answers.values()].filter(({ controller }) => !controller);
  }

  /** Bring the answers of other tabs in a chat up to date. */
  update(chat) {
    for (const { message } of this.inChat(chat.id)) {
      const ours = chat.messages[message.id];
      if (ours) become(ours, message);
    }
  }

  begin(chat, message) {
    const answer = { chatId: chat.id, chat, message, controller: new AbortController(), dropped: false,
                     savedAt: performance.now(), toldAt: -Infinity };
    this.answers.set(message.id, answer);
    return answer;
  }

  /** Tell how far an answer of this tab is, unless that was told a moment ago. */
  report(answer) {
    const now = performance.now(), { text, reasoning = "" } = answer.message;
    const pause = TELL_MS + (text.length + reasoning.length) / CHARACTERS_A_MS;
    if (now - answer.toldAt < pause) return;
    answer.toldAt = now;
    tell("answering", answer);
  }

  /** An answer of this tab has ended; other tabs hear of it by `tellEnd`, once it is kept. */
  end({ message }) {
    this.answers.delete(message.id);
  }

  /** Stop an answer, in whichever tab. */
  stop(message) {
    const { controller } = this.answers.get(message.id) ?? {};
    if (controller) controller.abort();
    else channel.postMessage({ kind: "stop", message: { id: message.id } });
  }

  /** Stop the answers of a chat that is deleted; nothing of it is kept again. */
  drop(id) {
    for (const answer of this.here()) {
      if (answer.chatId !== id) continue;
      answer.dropped = true;
      answer.controller.abort();
    }
  }

  // ---- other tabs ----------------------------------------------------------------------------

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

  /** Ask how far the answers are; those of which nothing was heard will not go on. */
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

/** Tell other tabs that an answer of this one has ended. */
export function tellEnd(answer) {
  tell("ended", answer);
}

function tell(kind, { chatId, message }) {
  message.revised = Date.now();
  channel.postMessage({ kind, chatId, message });
}
