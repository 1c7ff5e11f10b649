// A chat as plain data: a tree of messages with a chosen path.
//
// Editing or regenerating adds a sibling; nothing is overwritten. `messages` maps ids to messages in
// the order in which they were added, so parents come before their children. Messages are never
// removed, and `revised` is the time of an answer's last change, so that the states of several tabs
// can be merged.

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
  const messages = [];
  for (let id = chat.chosen[ROOT]; id; id = chat.chosen[id]) messages.push(chat.messages[id]);
  return messages;
}

/** The versions of a message, itself included. */
export function siblings(chat, message) {
  return Object.values(chat.messages).filter(other => other.parent === message.parent)
    .sort((a, b) => a.at - b.at);
}

/** Merge the state that another tab has saved of the same chat: new messages, which are selected, and
 * newer states of others. */
export function merge(chat, saved) {
  const fresh = new Set();
  for (const theirs of Object.values(saved.messages)) {
    const ours = chat.messages[theirs.id];
    if (!ours) {
      chat.messages[theirs.id] = theirs;
      fresh.add(theirs.id);
    } else if (theirs.revised > (ours.revised ?? 0)) become(ours, theirs);
  }
  for (const [parent, id] of Object.entries(saved.chosen)) {
    if (fresh.has(id) || !chat.chosen[parent]) chat.chosen[parent] = id;
  }
  chat.updated = Math.max(chat.updated, saved.updated);
}

/** Replace the state of a message by another tab's. */
export function become(ours, theirs) {
  for (const name of Object.keys(ours)) if (!(name in theirs)) delete ours[name];
  Object.assign(ours, theirs);
}

/** The messages of a request whose answer goes below `parent`. */
export function messagesUpTo(chat, parent) {
  const messages = pathTo(chat, parent).filter(({ role }) => role !== "approval").map(asRequested);
  return chat.system.trim() ? [{ role: "system", content: chat.system }, ...messages] : messages;
}

/** The messages for the model, down to this one: from the beginning, or from where the chat was
 * shortened. */
export function pathTo(chat, id) {
  const messages = [];
  for (let message = chat.messages[id]; message; message = chat.messages[message.parent]) {
    messages.push(message);
    if (message.id === chat.begins) break;
  }
  return messages.reverse();
}

/** The content of a message for the model: its text, and below it its files. */
export function contentOf({ text, files = [] }) {
  return [text, ...files.map(({ name, text }) => `${name}:\n${fenced(text)}`)].filter(Boolean)
    .join("\n\n");
}

/** A text in a code fence that is longer than any in the text. */
export function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(run => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

function asRequested(message) {
  const { role, text, calls, ran, callId } = message;
  if (role === "tool") return { role, content: text, tool_call_id: callId };
  const entry = { role, content: contentOf(message) };
  const sent = ran?.filter(call => call.server).map(mcpCall);
  if (sent?.length) entry.mcp_calls = sent;
  if (!calls?.length) return entry;
  const tool_calls = calls.map(({ id, name, text }) =>
    ({ id, type: "function", function: { name, arguments: text } }));
  return { ...entry, content: text || null, tool_calls };
}

/** A call that the router ran, in the form for the model. */
export function mcpCall({ id, server, name, text, output, failed }) {
  const result = failed ? { output: null, error: output } : { output, error: null };
  return { type: "mcp_call", id, server_label: server, name, arguments: text || "{}", ...result };
}

/** The tool of a call, with its MCP server. */
export function toolOf({ server, name }) {
  return server ? `${server}: ${name}` : name;
}

/** The user's decisions about calls. */
export function inWords(decisions = []) {
  return decisions.map(call => `${call.approve ? "Allowed" : "Denied"} ${toolOf(call)}`).join("; ");
}

/** The title of a chat: its name, or its first message. */
export function titleOf(chat) {
  if (chat.title) return chat.title;
  const first = Object.values(chat.messages).find(message => message.role === "user");
  const said = first?.text || first?.files?.[0].name || "";
  const line = said.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}

/** True if the chat contains every word. */
export function mentions(chat, words) {
  const texts = Object.values(chat.messages).map(message => message.text);
  const all = [titleOf(chat), chat.system, ...texts].join("\n").toLowerCase();
  return words.every(word => all.includes(word));
}
