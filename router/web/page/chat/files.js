// Chats as files: JSON, which comes back as it was, and Markdown, which people read.

import { contentOf, fenced, inWords, newId, path, titleOf } from "./conversation.js";

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

/** A call, with its result if the router has run it. */
function asCode({ server, name, text, output }) {
  const lines = [`${server ? `${server}: ` : ""}${name} ${text}`, ...(output ? [output] : [])];
  return fenced(lines.join("\n"));
}

/** A name for a file of this chat. */
export function fileName(chat, ending) {
  const words = titleOf(chat).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 50) || "chat"}.${ending}`;
}

/** The chats in a file, with new ids: what is here already stays. Also takes a list of messages in
 * OpenAI's form. Raises an error that says what is wrong with the file. */
export function fromJson(text) {
  if (text.length > MAX_BYTES) throw new Error("The file is larger than 50 MB.");
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (Array.isArray(value?.messages)) return [fromMessages(value.messages)];
  if (value?.format !== FORMAT || !Array.isArray(value.chats)) {
    throw new Error("The file has neither chats of Tandem nor a list of messages.");
  }
  return value.chats.map(imported);
}

function imported(given) {
  const ids = new Map([["", ""]]);
  const messages = {};
  for (const message of Object.values(objectOf(given?.messages))) {
    // Parents come first, so there are no circles.
    const parent = ids.get(textOf(message?.parent));
    if (parent === undefined || !ROLES.includes(message.role)) {
      throw new Error("A message in the file has an unknown parent or role.");
    }
    const id = newId();
    ids.set(textOf(message.id), id);
    messages[id] = cleaned(message, id, parent);
  }
  const chosen = Object.entries(objectOf(given.chosen))
    .map(([parent, id]) => [ids.get(parent), ids.get(id)])
    .filter(([parent, id]) => id && messages[id].parent === parent);
  return { id: newId(), title: textOf(given.title), created: timeOf(given.created),
           updated: timeOf(given.updated), system: textOf(given.system), model: textOf(given.model),
           begins: ids.get(textOf(given.begins)) ?? "", sampling: objectOf(given.sampling), messages, chosen: Object.fromEntries(chosen) };
}

function cleaned(message, id, parent) {
  const { role, stats } = message;
  const made = { id, parent, role, text: textOf(message.text), at: timeOf(message.at) };
  if (message.reasoning) made.reasoning = textOf(message.reasoning);
  if (Array.isArray(message.files) && message.files.length) {
    made.files = message.files.map(file => ({ name: textOf(file?.name), text: textOf(file?.text) }));
  }
  if (message.callId) made.callId = textOf(message.callId);
  if (role === "tool") made.name = textOf(message.name);
  if (Array.isArray(message.calls)) {
    made.calls = message.calls.map(call =>
      ({ id: textOf(call?.id), name: textOf(call?.name), text: textOf(call?.text) }));
  }
  if (Array.isArray(message.ran)) {
    made.ran = message.ran.map(call => (
      { ...namedCall(call), output: textOf(call?.output), failed: !!call?.failed,
        approval: textOf(call?.approval) || null }));
  }
  if (Array.isArray(message.approvals)) made.approvals = message.approvals.map(namedCall);
  if (role === "approval") {
    made.decisions = (Array.isArray(message.decisions) ? message.decisions : [])
      .map(call => ({ ...namedCall(call), approve: !!call?.approve }));
  }
  const seconds = ["first", "total", "rate", "tokens", "prompt", "cached", "remote"];
  if (stats && seconds.every(name => typeof (stats[name] ?? 0) === "number")) {
    made.stats = Object.fromEntries(seconds.map(name => [name, stats[name]]));
    made.stats.prefill = textOf(stats.prefill);
    made.stats.decode = textOf(stats.decode);
  }
  return made;
}

function fromMessages(list) {
  const messages = {}, chosen = {};
  let parent = "", system = "";
  for (const { role, content, tool_calls, tool_call_id } of list) {
    if (!ROLES.includes(role)) throw new Error(`A message in the file has the role '${role}'.`);
    const text = typeof content === "string" ? content : partsOf(content);
    if (role === "system") {
      system = text;
      continue;
    }
    const id = newId();
    messages[id] = { id, parent, role, text, at: Date.now() };
    if (role === "tool") messages[id].callId = textOf(tool_call_id);
    if (Array.isArray(tool_calls)) messages[id].calls = tool_calls.map(callOf);
    chosen[parent] = parent = id;
  }
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), system, model: "",
           sampling: {}, messages, chosen };
}

const namedCall = call => ({ id: textOf(call?.id), server: textOf(call?.server),
                             name: textOf(call?.name), text: textOf(call?.text) });
const callOf = call => ({ id: textOf(call?.id), name: textOf(call?.function?.name),
                          text: textOf(call?.function?.arguments) });
const partsOf = parts => (Array.isArray(parts) ? parts : [])
  .map(part => textOf(part?.text)).join("\n");
const textOf = value => (typeof value === "string" ? value : "");
const timeOf = value => (Number.isFinite(value) ? value : Date.now());
const objectOf = value => (value && typeof value === "object" && !Array.isArray(value) ? value : {});
