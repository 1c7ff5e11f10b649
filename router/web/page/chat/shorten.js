// A chat that is longer than the context: from which message on the model can still read it.

import { request } from "../server.js";
import { messagesUpTo, pathTo } from "./conversation.js";

// Tokens that an answer gets unless the settings say how many.
const ROOM = 1_024;

/** True if older messages can be left out of a request that is answered below `parent`. */
export function canShorten(chat, parent) {
  return startsOf(chat, parent).length > 1;
}

/** Have requests of the chat begin at the oldest message of the user from which on everything down
 * to `parent` fits into the context, with room for an answer; at the last one if none does. */
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

/** The messages at which a request may begin; the first is where it begins now. */
const startsOf = (chat, parent) => pathTo(chat, parent).filter(({ role }) => role === "user");

async function fits(chat, parent, model) {
  const body = { model, messages: messagesUpTo(chat, parent) };
  const { count, max_model_len: most } = await (await request("tokenize", { body })).json();
  return count + Math.min(chat.sampling.max_tokens ?? ROOM, most / 4) <= most;
}
