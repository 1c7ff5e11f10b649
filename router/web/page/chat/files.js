// Chats as files: JSON, which can be imported again, and Markdown for people.

import { contentOf, fenced, inWords, newId, path, titleOf, toolOf } from "./conversation.js";

const FORMAT = "tandem-chats";
const MAX_BYTES = 50_000_000;
const ROLES = ["user", "assistant", "system", "tool", "approval"];

export function toJson(chats) {
  return JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);
}

export function toMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}`];
  if (chat.system.trim()) parts.push("## System", chat.system);
  for (const message of path(chat)) {
    const { role, reasoning, calls, ran, decisions } = message;
    if (role === "approval") {
      parts.push(inWords(decisions));
      continue;
    }
    parts.push(`## ${role[0].toUpperCase()}${role.slice(1)}`);
    if (reasoning) parts.push(reasoning.replace(/^/gm, "> "));
    const content = contentOf(message);
    if (content) parts.push(content);
    for (const call of [...(ran ?? []), ...(calls ?? [])]) parts.push(asCode(call));
  }
  return parts.join("\n\n") + "\n";
}

/** A call, with its result if the router ran it. */
function asCode(call) {
  const lines = [`${toolOf(call)} ${call.text}`, ...(call.output ? [call.output] : [])];
  return fenced(lines.join("\n"));
}

/** A file name for this chat. */
export function fileName(chat, ending) {
  const words = titleOf(chat).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 50) || "chat"}.${ending}`;
}

/** The chats in a file, with new ids, so that none is overwritten. Also accepts a list of messages in
 * OpenAI's format. Raises an error with a message for the user. */
export function fromJson(text) {
  if (text.length > MAX_BYTES) throw new Error("The file is larger than 50 MB.");
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (Array.isArray(value?.messages)) return [imported(ofMessages(value.messages))];
  if (value?.format !== FORMAT || !Array.isArray(value.chats)) {
    throw new Error("The file has neither chats of Tandem nor a list of messages.");
  }
  return value.chats.map(imported);
}

function imported(chat) {
  const ids = new Map([["", ""]]);
  const messages = {};
  for (const message of Object.values(object(chat?.messages))) {
    const { role } = object(message);
    if (!ROLES.includes(role)) throw new Error(`A message in the file has the role '${role}'.`);
    // Parents come first, so there are no circles.
    const parent = ids.get(text(message.parent));
    if (parent === undefined) throw new Error("A message in the file has an unknown parent.");
    const id = newId();
    ids.set(text(message.id), id);
    messages[id] = { id, parent, ...read(MESSAGE, message) };
  }
  const chosen = Object.entries(object(chat.chosen))
    .map(([parent, id]) => [ids.get(parent), ids.get(id)])
    .filter(([parent, id]) => id && messages[id].parent === parent);
  return { id: newId(), ...read(CHAT, chat), begins: ids.get(text(chat.begins)) ?? "", messages,
           chosen: Object.fromEntries(chosen) };
}

/** A chat from messages in OpenAI's format. */
function ofMessages(list) {
  const messages = {}, chosen = {};
  let parent = "", system = "";
  for (const { role, content, tool_calls: calls, tool_call_id: callId } of list) {
    const text = typeof content === "string" ? content : partsOf(content);
    if (role === "system") {
      system = text;
      continue;
    }
    const id = newId();
    messages[id] = { id, parent, role, text, callId,
                     calls: Array.isArray(calls) ? calls.map(callOf) : null };
    chosen[parent] = parent = id;
  }
  return { system, messages, chosen };
}

const callOf = call => ({ id: call?.id, name: call?.function?.name, text: call?.function?.arguments });
const partsOf = parts => (Array.isArray(parts) ? parts : [])
  .map(part => text(part?.text)).join("\n");

// Readers of a file's fields, which turn any value into one that the page can show.
const text = value => (typeof value === "string" ? value : "");
const time = value => (Number.isFinite(value) ? value : Date.now());
const amount = value => (Number.isFinite(value) ? value : 0);
const flag = value => !!value;
const object = value => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
const list = fields => values => (
  Array.isArray(values) ? values.map(value => read(fields, value)) : []);
const optional = reader => value => (value ? reader(value) : undefined);

const CALL = { id: text, name: text, text };
const SERVER_CALL = { ...CALL, server: text };
const STATS = { first: amount, total: amount, rate: amount, tokens: amount, prompt: amount,
                cached: amount, remote: amount, prefill: text, decode: text };
const MESSAGE = {
  role: text, text, at: time, reasoning: optional(text), name: optional(text), callId: optional(text),
  files: optional(list({ name: text, text })), calls: optional(list(CALL)),
  ran: optional(list({ ...SERVER_CALL, output: text, failed: flag, approval: optional(text) })),
  approvals: optional(list(SERVER_CALL)), decisions: optional(list({ ...SERVER_CALL, approve: flag })),
  stats: optional(stats => read(STATS, stats)),
};
const CHAT = { title: text, created: time, updated: time, system: text, model: text,
               sampling: object };

function read(fields, value) {
  const entries = Object.entries(fields).map(([name, reader]) => [name, reader(value?.[name])]);
  return Object.fromEntries(entries.filter(([, field]) => field !== undefined));
}
