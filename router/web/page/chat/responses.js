// Chats with approvals of calls: requests of the Responses API, and its events converted to those of
// chat completions.

import { ServerError } from "../server.js";
import { contentOf, mcpCall } from "./conversation.js";

/** The body for the Responses API from a chat completion's, for the messages of a chat's `path`. */
export function responseBody(path, instructions, chatBody) {
  const { messages, stream_options, max_tokens, reasoning_effort, response_format, tools = [],
          ...body } = chatBody;
  Object.assign(body, { input: path.flatMap(itemsOf), store: false, tools: tools.map(withApproval) });
  if (instructions.trim()) body.instructions = instructions;
  if (max_tokens) body.max_output_tokens = max_tokens;
  if (reasoning_effort) body.reasoning = { effort: reasoning_effort };
  if (response_format) body.text = { format: formatOf(response_format) };
  return body;
}

const withApproval = tool => (tool.type === "mcp" ? { ...tool, require_approval: "always" } :
  { type: tool.type, ...tool.function });

const formatOf = ({ type, json_schema }) => ({ type, ...json_schema });

/** The items of a message, in order. */
function itemsOf(item) {
  const { role, text, ran = [], calls = [], approvals = [], decisions = [], callId } = item;
  if (role === "tool") return [{ type: "function_call_output", call_id: callId, output: text }];
  if (role === "approval") return decisions.map(decisionItem);
  const content = contentOf(item);
  const message = content ? [{ type: "message", role, content }] : [];
  return [...ran.filter(call => call.server).map(ranItem), ...message, ...calls.map(callItem),
          ...approvals.map(approvalItem)];
}

const decisionItem = ({ id, approve }) =>
  ({ type: "mcp_approval_response", approval_request_id: id, approve });

const approvalItem = ({ id, server, name, text }) =>
  ({ type: "mcp_approval_request", id, server_label: server, name, arguments: text });

const callItem = ({ id, name, text }) =>
  ({ type: "function_call", call_id: id, name, arguments: text || "{}" });

const ranItem = call => ({ ...mcpCall(call), approval_request_id: call.approval ?? null });

/** The events of a response as chat completion chunks. Raises `ServerError` if it failed. */
export async function* chunksOf(events) {
  for await (const event of events) {
    const chunk = chunkOf(event);
    if (chunk) yield chunk;
  }
}

function chunkOf({ type, delta, item, response }) {
  switch (type) {
    case "response.output_text.delta": return chunk({ content: delta });
    case "response.reasoning_text.delta": return chunk({ reasoning: delta });
    case "response.output_item.done": return chunkOfItem(item);
    case "response.completed": case "response.incomplete": return lastChunk(response);
    case "response.failed":
      throw new ServerError(response.error?.message ?? "The response failed.", 500);
    default: return null;
  }
}

const chunk = (delta, finish_reason = null) => ({ choices: [{ delta, finish_reason }] });

function chunkOfItem(item) {
  switch (item.type) {
    case "mcp_call": return chunk({ mcp_calls: [item] });
    case "mcp_approval_request": return chunk({ approvals: [item] });
    case "function_call": return chunk({ tool_calls: [
      { id: item.call_id, function: { name: item.name, arguments: item.arguments } }] });
    default: return null;
  }
}

function lastChunk({ status, usage }) {
  const { input_tokens: prompt_tokens, output_tokens: completion_tokens } = usage;
  const prompt_tokens_details = usage.input_tokens_details;
  return { ...chunk({}, status === "incomplete" ? "length" : "stop"),
           usage: { prompt_tokens, completion_tokens, prompt_tokens_details } };
}
