// A chat as plain data: a tree of messages, in which one path is chosen.
//
// Editing a message or asking again adds a sibling, and nothing is ever overwritten. `messages` maps
// ids to messages in the order in which they were added, so a parent comes before its children.

const ROOT = "";

export function newChat(sampling = {}, system = "") {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, sampling: { ...sampling },
           model: "", messages: {}, chosen: {} };
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, byte => byte.toString(16).padStart(2, "0")).join("");
}

/** Add a message below `parent` (null: at the beginning), and choose it. */
export function add(chat, parent, fields) {
  const message = { id: newId(), parent: parent ?? ROOT, text: "", at: Date.now(), ...fields };
  chat.messages[message.id] = message;
  chat.chosen[message.parent] = message.id;
  chat.updated = message.at;
  return message;
}

/** The chosen path from the beginning to a leaf. */
export function path(chat) {
  const found = [];
  for (let id = chat.chosen[ROOT]; id; id = chat.chosen[id]) found.push(chat.messages[id]);
  return found;
}

/** The messages that stand for the same place as this one, itself included. */
export function siblings(chat, message) {
  return Object.values(chat.messages).filter(other => other.parent === message.parent);
}

/** Choose a message; below it the path is as it was when it was chosen last. */
export function choose(chat, message) {
  chat.chosen[message.parent] = message.id;
}

/** Remove a message and all below it, and choose a sibling. */
export function remove(chat, message) {
  const gone = new Set([message.id]);
  for (const other of Object.values(chat.messages)) {
    if (gone.has(other.parent)) gone.add(other.id);
  }
  for (const id of gone) {
    delete chat.messages[id];
    delete chat.chosen[id];
  }
  const left = siblings(chat, message).at(-1);
  if (left) chat.chosen[message.parent] = left.id;
  else delete chat.chosen[message.parent];
}

/** The messages of a request that is answered below `parent`. */
export function messagesUpTo(chat, parent) {
  const found = [];
  for (let message = chat.messages[parent]; message; message = chat.messages[message.parent]) {
    found.unshift(asRequested(message));
  }
  return chat.system.trim() ? [{ role: "system", content: chat.system }, ...found] : found;
}

function asRequested({ role, text, calls, callId }) {
  if (role === "tool") return { role, content: text, tool_call_id: callId };
  if (!calls?.length) return { role, content: text };
  const tool_calls = calls.map(({ id, name, text }) =>
    ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: text || null, tool_calls };
}

/** The title of a chat, from what was said first unless it has a name. */
export function titleOf(chat) {
  if (chat.title) return chat.title;
  const first = Object.values(chat.messages).find(message => message.role === "user");
  const line = (first?.text ?? "").trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}

/** True if every word is somewhere in the chat. */
export function mentions(chat, words) {
  const texts = Object.values(chat.messages).map(message => message.text);
  const all = [titleOf(chat), chat.system, ...texts].join("\n").toLowerCase();
  return words.every(word => all.includes(word));
}
