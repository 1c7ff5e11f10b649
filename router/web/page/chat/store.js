// The chats of this browser, in IndexedDB. Where that is refused (private windows), they last as
// long as the page.

import { titleOf } from "./conversation.js";

const NAME = "tandem", CHATS = "chats", HEADS = "heads";
const channel = "BroadcastChannel" in window ? new BroadcastChannel("tandem.chats") : null;

export class ChatStore {
  constructor() {
    this.lasting = true;
    this.memory = new Map();
    this.opening = null;
  }

  /** Have `listener` called with the id of a chat that another tab has changed. */
  whenChangedElsewhere(listener) {
    channel?.addEventListener("message", event => listener(event.data));
  }

  /** Id, title and time of every chat, the latest first. */
  async heads() {
    const heads = await this.all(HEADS);
    return heads.sort((a, b) => b.updated - a.updated);
  }

  async chats() {
    return this.all(CHATS);
  }

  async get(id) {
    const database = await this.open();
    if (!database) return structuredClone(this.memory.get(id));
    return done(database.transaction(CHATS).objectStore(CHATS).get(id));
  }

  async put(chat) {
    const head = { id: chat.id, title: titleOf(chat), updated: chat.updated };
    const database = await this.open();
    if (!database) this.memory.set(chat.id, structuredClone(chat));
    else {
      const change = database.transaction([CHATS, HEADS], "readwrite");
      change.objectStore(CHATS).put(chat);
      change.objectStore(HEADS).put(head);
      await finished(change);
    }
    channel?.postMessage(chat.id);
  }

  async remove(id) {
    const database = await this.open();
    if (!database) this.memory.delete(id);
    else {
      const change = database.transaction([CHATS, HEADS], "readwrite");
      change.objectStore(CHATS).delete(id);
      change.objectStore(HEADS).delete(id);
      await finished(change);
    }
    channel?.postMessage(id);
  }

  async all(name) {
    const database = await this.open();
    if (database) return done(database.transaction(name).objectStore(name).getAll());
    const chats = [...this.memory.values()];
    return name === CHATS ? structuredClone(chats) :
      chats.map(chat => ({ id: chat.id, title: titleOf(chat), updated: chat.updated }));
  }

  open() {
    this.opening ??= opened().catch(() => {
      this.lasting = false;
      return null;
    });
    return this.opening;
  }
}

function opened() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => {
    for (const name of [CHATS, HEADS]) opening.result.createObjectStore(name, { keyPath: "id" });
  };
  return done(opening);
}

function done(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

function finished(change) {
  return new Promise((resolve, reject) => {
    change.oncomplete = () => resolve();
    change.onerror = change.onabort = () => reject(change.error);
  });
}
