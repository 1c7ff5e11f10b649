// One answer while it streams: its text, reasoning and tool calls, and its speed.

import { ServerError, eventsOf, request } from "../server.js";
import { messagesUpTo, pathTo } from "./conversation.js";
import { chunksOf, responseBody } from "./responses.js";
import { FIELDS } from "./sampling.js";

// Shortest time, in seconds, over which a rate is meaningful.
const SHORTEST = 0.05;

/** Fill `message` from the stream of a request, and call `changed` with each piece. Raises
 * `ServerError`, or `AbortError` if `signal` stops it; text so far stays in `message`. */
export async function stream(message, body, signal, changed) {
  const clock = new Clock();
  const path = body.input ? "v1/responses" : "v1/chat/completions";
  const response = await request(path, { body, signal });
  try {
    const events = eventsOf(response);
    for await (const event of body.input ? chunksOf(events) : events) {
      take(message, event, clock);
      changed();
    }
    if (message.ended === "interrupted") delete message.ended;
  } finally {
    message.stats = clock.stats();
  }
}

function take(message, event, clock) {
  const [choice] = event.choices;
  if (choice) {
    const { content, tool_calls, mcp_calls, approvals } = choice.delta;
    const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content;
    if (reasoning || content || tool_calls) clock.tick();
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (content) {
      if (message.reasoning && !message.text) message.thought = clock.sinceFirst();
      message.text += content;
    }
    for (const call of tool_calls ?? []) takeCall(message, call);
    // MCP tool calls that the router ran.
    for (const call of mcp_calls ?? []) (message.ran ??= []).push(executed(call));
    // Calls that need the user's approval.
    for (const one of approvals ?? []) (message.approvals ??= []).push(approvalRequest(one));
    if (choice.finish_reason) message.ended = choice.finish_reason;
  }
  if (event.usage) clock.counted(event);
}

function takeCall(message, { index, id, function: piece }) {
  message.calls ??= [];
  // Calls of the Responses API come in one piece, and without an index.
  const call = (message.calls[index ?? message.calls.length] ??= { id: "", name: "", text: "" });
  if (id) call.id = id;
  if (piece?.name) call.name = piece.name;
  call.text += piece?.arguments ?? "";
}

function executed({ id, name, server_label: server, arguments: text, output, error,
                    approval_request_id: approval }) {
  const failure = typeof error === "string" || !error ? error : error.message ?? JSON.stringify(error);
  return { id, server, name, text, output: output ?? failure ?? "", failed: !!error, approval };
}

const approvalRequest =
  ({ id, name, server_label: server, arguments: text }) => ({ id, server, name, text });

/** Timings of one answer, by the browser's clock. */
class Clock {
  constructor() {
    this.start = performance.now();
    this.firstAt = 0;
    this.lastAt = 0;
    this.pieces = 0;
    this.usage = null;
    this.placement = null;
  }

  tick() {
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    this.pieces++;
  }

  counted({ usage, tandem }) {
    this.usage = usage;
    this.placement = tandem ?? this.placement;
  }

  sinceFirst() {
    return (performance.now() - this.firstAt) / 1000;
  }

  stats() {
    if (!this.firstAt) return null;
    const { usage, placement } = this;
    // Without usage, because the answer was stopped, count each event as a token.
    const tokens = usage?.completion_tokens ?? this.pieces;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      first: (this.firstAt - this.start) / 1000,
      total: (performance.now() - this.start) / 1000,
      rate: tokens > 1 && seconds > SHORTEST ? (tokens - 1) / seconds : 0,
      tokens,
      prompt: usage?.prompt_tokens ?? 0,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
      remote: placement?.remote_tokens ?? 0,
      prefill: placement?.prefill_nodes?.join(", ") ?? "",
      decode: placement?.decode_nodes?.join(", ") ?? "",
    };
  }
}

/** The body of a request; raises `ServerError` if the further fields are not valid JSON. */
export function bodyOf(chat, { parent }, model) {
  const body = chatBody(messagesUpTo(chat, parent), model, chat.sampling);
  const asks = chat.sampling.ask && body.tools?.some(tool => tool?.type === "mcp");
  return asks ? responseBody(pathTo(chat, parent), chat.system, body) : body;
}

/** The body of a request that continues an answer. */
export function continuationOf(chat, message, model) {
  const body = chatBody(messagesUpTo(chat, message.id), model, chat.sampling);
  return { ...body, add_generation_prompt: false, continue_final_message: true };
}

/** False for an answer that its text alone cannot continue: with unfinished reasoning, with tool calls,
 * or in a chat with approvals, which needs the Responses API. */
export function canContinue(chat, { role, text, calls, ran, approvals }) {
  return role === "assistant" && !!text && !calls && !ran && !approvals && !chat.sampling.ask;
}

function chatBody(messages, model, { ask, ...sampling }) {
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  for (const { name } of FIELDS) {
    if ((sampling[name] ?? "") !== "") body[name] = sampling[name];
  }
  return withTools(Object.assign(body, furtherFields(sampling.more)));
}

/** The body with the tools of the MCP servers labelled in its `mcp`. */
function withTools({ mcp, ...body }) {
  if (!mcp?.length) return body;
  const servers = mcp.map(label => ({ type: "mcp", server_label: label.trim() }));
  return { ...body, tools: [...(Array.isArray(body.tools) ? body.tools : []), ...servers] };
}

const OURS = ["messages", "stream", "stream_options", "model", "n"];

function furtherFields(text) {
  let fields;
  try {
    fields = JSON.parse(text || "{}");
  } catch (error) {
    throw new ServerError(`The further fields in the settings are not JSON: ${error.message}`, 400);
  }
  const reserved = OURS.find(name => Object.hasOwn(fields ?? {}, name));
  if (reserved || !fields || typeof fields !== "object" || Array.isArray(fields)) {
    const why = reserved ? `may not have '${reserved}'` : "must be an object";
    throw new ServerError(`The further fields in the settings ${why}.`, 400);
  }
  return fields;
}
