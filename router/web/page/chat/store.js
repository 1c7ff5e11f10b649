// The chats of this browser, in IndexedDB, shared by all tabs. If that is unavailable (private
// windows), chats live as long as the page.

import { merge, titleOf } from "./conversation.js";

const NAME = "tandem", CHATS = "chats", HEADS = "heads";

// Broadcasts the ids of chats that a tab has saved or deleted.
const channel = new BroadcastChannel("tandem.chats");

export class ChatStore {
  constructor() {
    this.lasting = true;
    this.memory = new Map();
    this.known = new Set();  // ids of all loaded chats, to detect deleted ones
    this.opening = null;
  }

  /** Call `listener` with the id of each chat that another tab has saved or deleted. */
  whenChanged(listener) {
    channel.addEventListener("message", ({ data }) => listener(data));
  }

  /** Id, title and time of every chat, latest first. */
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
    const saved = await done(database.transaction(CHATS).objectStore(CHATS).get(id));
    if (saved) this.known.add(id);
    return saved;
  }

  /** Save a chat, merged with the state that other tabs have saved, which `chat` takes over. False if it
   * was deleted in the meantime; it is then not saved. */
  async put(chat) {
    const database = await this.open();
    if (!database) {
      this.memory.set(chat.id, structuredClone(chat));
      return true;
    }
    const change = database.transaction([CHATS, HEADS], "readwrite");
    const saved = await done(change.objectStore(CHATS).get(chat.id));
    if (!saved && this.known.has(chat.id)) return false;
    if (saved) merge(chat, saved);
    change.objectStore(CHATS).put(chat);
    change.objectStore(HEADS).put(headOf(chat));
    await finished(change);
    this.known.add(chat.id);
    channel.postMessage(chat.id);
    return true;
  }

  /** Update a chat with the state that another tab has saved. False if it was deleted. */
  async refresh(chat) {
    const saved = await this.get(chat.id);
    if (!saved) return !this.known.has(chat.id);
    merge(chat, saved);
    const { title, system, sampling, model, begins } = saved;
    Object.assign(chat, { title, system, sampling, model, begins });
    return true;
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
    channel.postMessage(id);
  }

  async all(name) {
    const database = await this.open();
    if (database) return done(database.transaction(name).objectStore(name).getAll());
    const chats = [...this.memory.values()];
    return name === CHATS ? structuredClone(chats) : chats.map(headOf);
  }

  open() {
    this.opening ??= opened().catch(() => {
      this.lasting = false;
      return null;
    });
    return this.opening;
  }
}

const headOf = chat => ({ id: chat.id, title: titleOf(chat), updated: chat.updated });

function opened() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => {
    for (const name of [CHATS, HEADS]) opening.result.createObjectStore(name, { keyPath: "id" });
  };
  return done(opening);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(change) {
  return new Promise((resolve, reject) => {
    change.oncomplete = () => resolve();
    change.onerror = change.onabort = () => reject(change.error);
  });
}
