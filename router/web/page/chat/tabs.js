// The other tabs of the page in this browser: the chats that they change, and the answers that they
// stream, which are shown here as they grow.

const channel = "BroadcastChannel" in window ? new BroadcastChannel("tandem.tabs") : null;
// Between two states of an answer, which are told whole: a long one is told less often.
const TELL_MS = 150, CHARACTERS_A_MS = 500;
// Tabs that stream are asked this often; one that has left so many questions open is gone.
const ASK_MS = 1_500, OPEN_QUESTIONS = 3;

/** Tell other tabs that a chat was kept or deleted. */
export function tellChanged(chat) {
  tell({ kind: "changed", chat });
}

function tell(what) {
  channel?.postMessage(what);
}

export class OtherTabs {
  /** `own` returns the answers that are streamed here. `listener` has the functions changed and stop,
   * which get the id of a chat and of a message, and answering and ended, which get an answer: the id
   * of its `chat`, the `message` as its tab has it, and if it `begins`. */
  constructor(own, listener) {
    this.own = own;
    this.listener = listener;
    this.answers = new Map();  // by the message's id, with the number of open questions
    channel?.addEventListener("message", ({ data }) => this.hear(data));
    addEventListener("pagehide", () => this.leave());
    tell({ kind: "ask" });
  }

  get count() {
    return this.answers.size;
  }

  has(message) {
    return this.answers.has(message.id);
  }

  /** The answers of a chat, as last told. */
  inChat(id) {
    return [...this.answers.values()].filter(({ chat }) => chat === id).map(({ message }) => message);
  }

  // ---- answers of this tab -------------------------------------------------------------------

  /** Tell how far an answer is, unless that was told a moment ago. */
  report(running) {
    const now = performance.now(), { text, reasoning = "" } = running.message;
    const pause = TELL_MS + (text.length + reasoning.length) / CHARACTERS_A_MS;
    if (now - (running.toldAt ?? -Infinity) < pause) return;
    running.toldAt = now;
    this.tellAnswer("answering", running);
  }

  /** Tell that an answer has ended. */
  conclude(running) {
    this.tellAnswer("ended", running);
  }

  tellAnswer(kind, { chat, message }) {
    message.revised = Date.now();
    tell({ kind, chat: chat.id, message });
  }

  /** The page is closed, and what it streams breaks off. */
  leave() {
    for (const running of this.own()) this.conclude(running);
  }

  // ---- answers of others ---------------------------------------------------------------------

  /** Have another tab stop its answer. */
  stop(message) {
    tell({ kind: "stop", message: message.id });
  }

  hear(said) {
    switch (said.kind) {
      case "changed": return this.listener.changed(said.chat);
      case "stop": return this.listener.stop(said.message);
      case "ask": return this.own().forEach(running => this.tellAnswer("answering", running));
      case "answering": return this.follow(said);
      case "ended": return this.forget(said);
    }
  }

  follow({ chat, message }) {
    const begins = !this.answers.has(message.id);
    this.answers.set(message.id, { chat, message, open: 0 });
    this.listener.answering({ chat, message, begins });
    this.asking ??= setInterval(() => this.ask(), ASK_MS);
  }

  /** Ask how far the answers are; those of which nothing was heard will not go on. */
  ask() {
    for (const answer of this.answers.values()) {
      if (answer.open++ >= OPEN_QUESTIONS) this.forget(answer);
    }
    tell({ kind: "ask" });
  }

  forget({ chat, message }) {
    this.answers.delete(message.id);
    this.listener.ended({ chat, message });
    if (this.answers.size) return;
    clearInterval(this.asking);
    this.asking = undefined;
  }
}
