// The chats that several tabs have: what the others tell, shown here.

import { become, merge } from "./conversation.js";

/** `view` is the chat view, `store` what keeps the chats. */
export class SharedChats {
  constructor(view, store) {
    this.view = view;
    this.store = store;
  }

  /** Another tab has kept or deleted a chat. */
  async changed(id) {
    const { view, store } = this;
    view.changed(view.chat);
    if (!view.live(id) || !store.lasting) return;
    const kept = await store.get(id);
    const chat = view.live(id);
    if (!chat) return;
    if (kept) this.takeIn(chat, kept);
    else if (store.known.has(id)) this.deleted(id);
  }

  takeIn(chat, kept) {
    const { view } = this;
    merge(chat, kept);
    const { title, system, sampling, model, begins } = kept;
    Object.assign(chat, { title, system, sampling, model, begins });
    if (chat !== view.chat) return;
    this.takeTold(chat);
    for (const shown of view.views.values()) shown.refresh();
    view.show();
    view.follow(false);
  }

  /** Bring the answers of other tabs in a chat up to date. */
  takeTold(chat) {
    for (const told of this.view.tabs.inChat(chat.id)) {
      const ours = chat.messages[told.id];
      if (ours) become(ours, told);
    }
  }

  /** A chat is gone. */
  deleted(id) {
    const { view } = this;
    view.forget(id);
    if (view.chat.id === id) {
      view.start(null);
      view.warn("This chat was deleted in another tab.");
    }
    view.changed(view.chat);
  }

  /** Stop an answer of this tab. */
  stop(id) {
    this.view.answers.stop({ id });
  }

  /** An answer of another tab begins or grows. */
  answering({ chat, message, begins }) {
    const { view } = this;
    const shown = this.told(chat, message);
    if (shown) {
      shown.state = "elsewhere";
      shown.refresh();
      view.follow(false);
    }
    if (!begins) return;
    view.showRunning();
    view.changed(view.chat);
  }

  /** An answer of another tab has ended, or its tab has. */
  async ended({ chat: id, message }) {
    const { view } = this;
    const shown = this.told(id, message), live = view.live(id);
    // Its tab was closed, and what it has told last may be kept nowhere. What is shown as ended is.
    if (message.ended === "interrupted" && live?.messages[message.id]) await view.save(live);
    if (shown) {
      shown.state = "";
      shown.refresh();
    }
    view.showRunning();
    view.changed(view.chat);
  }

  /** The view of a message of another tab, in its latest state; undefined if it is not shown. */
  told(id, message) {
    const { view } = this;
    const chat = view.live(id), ours = chat?.messages[message.id];
    if (ours) become(ours, message);
    return ours && chat === view.chat ? view.views.get(message.id) : undefined;
  }
}
