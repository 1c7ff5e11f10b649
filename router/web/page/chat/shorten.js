// Shorten a chat that is longer than the context.

import { request } from "../server.js";
import { messagesUpTo, pathTo } from "./conversation.js";

// Room for an answer in tokens, unless the settings have a limit.
const ROOM = 1_024;

/** True if a request whose answer goes below `parent` can leave out older messages. */
export function canShorten(chat, parent) {
  return startsOf(chat, parent).length > 1;
}

/** Shorten the chat to the oldest user message from which everything down to `parent` fits the context,
 * with room for an answer; to the last user message if none does. */
export async function shorten(chat, parent, model) {
  const starts = startsOf(chat, parent).slice(1);
  let low = 0, high = starts.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    chat.begins = starts[middle].id;
    if (await fits(chat, parent, model)) high = middle;
    else low = middle + 1;
  }
  chat.begins = starts[low].id;
}

/** The messages at which a request may begin; the first is the current one. */
const startsOf = (chat, parent) => pathTo(chat, parent).filter(({ role }) => role === "user");

async function fits(chat, parent, model) {
  const body = { model, messages: messagesUpTo(chat, parent) };
  const { count, max_model_len: most } = await (await request("tokenize", { body })).json();
  return count + Math.min(chat.sampling.max_tokens ?? ROOM, most / 4) <= most;
}
