// Requests to the router: the key, errors with their remedy, and server-sent events.

const KEY = "tandem.key";

/** A response that is not successful, or none; `status` is then 0. */
export class ServerError extends Error {
  constructor(message, status = 0, { code = "", retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;  // OpenAI's
    this.retryAfter = retryAfter;  // seconds
  }
}

export const LOST = "The server cannot be reached, or the connection was lost.";

let onKeyWanted = () => {};

/** Call `listener` when the server requires a key. */
export function whenKeyWanted(listener) {
  onKeyWanted = listener;
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

/** Store the key for this tab, or on this device. */
export function storeKey(key, lasting) {
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
  if (key) (lasting ? localStorage : sessionStorage).setItem(KEY, key);
}

/** A successful response; raises `ServerError` for any other. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  const options = { method: body === undefined ? "GET" : "POST", headers, signal };
  if (body !== undefined) options.body = JSON.stringify(body);
  const answer = await fetch(path, { ...options, credentials: "same-origin" }).catch(lose);
  if (answer.ok) return answer;
  if (answer.status === 401) onKeyWanted();
  const { message, code } = await problemOf(answer);
  throw new ServerError(message, answer.status, { code, retryAfter: secondsOf(answer) });
}

function lose(error) {
  throw error.name === "AbortError" ? error : new ServerError(LOST);
}

async function problemOf(answer) {
  try {
    const { message, code } = (await answer.json()).error;
    return { message, code };
  } catch {
    return { message: `The server returned HTTP ${answer.status}.` };
  }
}

function secondsOf(answer) {
  const seconds = Number(answer.headers.get("retry-after"));
  return seconds > 0 ? Math.min(seconds, 600) : null;
}

// The last events of the Responses API, which has no `[DONE]`.
const LAST = ["response.completed", "response.incomplete", "response.failed"];

/** The data of the events of a stream, up to the last one; raises `ServerError` if that is
 * missing. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lose);
      if (done) throw new ServerError(LOST);
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") return;
        const event = data && parsed(data);
        if (event) yield event;
        if (LAST.includes(event?.type)) return;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter(line => line.startsWith("data:"));
  return lines.map(line => line.slice(5).trimStart()).join("\n");
}

function parsed(data) {
  const event = JSON.parse(data);
  if (event.error) throw new ServerError(event.error.message ?? "The request failed.", 500);
  return event;
}

/** The served models, each with its context length and default parameters. */
export async function listModels(signal) {
  const { data } = await (await request("v1/models", { signal })).json();
  return data.map(card => ({ id: card.id, root: card.root, context: card.max_model_len,
                             defaults: card.default_sampling_params ?? {} }));
}
