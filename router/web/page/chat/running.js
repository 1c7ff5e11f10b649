// The answers that are being streamed, in whichever chat: they go on while another one is shown.

// Of all tabs: a browser opens six connections to a server; the rest is for the page, and the
// streams of the cluster page.
export const MOST = 3;

export class RunningAnswers {
  constructor() {
    this.answers = new Map();  // by the message's id: { chat, message, controller, dropped, savedAt }
  }

  get count() {
    return this.answers.size;
  }

  all() {
    return [...this.answers.values()];
  }

  begin(chat, message) {
    const running = { chat, message, controller: new AbortController(), dropped: false, savedAt: 0 };
    this.answers.set(message.id, running);
    return running;
  }

  end({ message }) {
    this.answers.delete(message.id);
  }

  has(message) {
    return this.answers.has(message.id);
  }

  stop(message) {
    this.answers.get(message.id)?.controller.abort();
  }

  /** The answers of a chat. */
  inChat(id) {
    return this.all().filter(({ chat }) => chat.id === id);
  }

  /** The chat with this id as its answers change it; undefined if it has none. */
  chat(id) {
    return this.inChat(id)[0]?.chat;
  }

  /** Stop the answers of a chat that is deleted; nothing of it is kept again. */
  drop(id) {
    for (const running of this.inChat(id)) {
      running.dropped = true;
      running.controller.abort();
    }
  }
}
