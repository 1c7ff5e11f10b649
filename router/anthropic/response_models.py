"""Anthropic's responses, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from ..requests.body_model import ResponseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str


class AnthropicError(ResponseModel):
    """An error, also as the last event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class ThinkingTokens(ResponseModel):
    thinking_tokens: int


class MessageUsage(ResponseModel):
    """``input_tokens`` counts the prompt's tokens that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None
    cache_creation: None  # this and the following belong to Anthropic's own service
    server_tool_use: None
    service_tier: None
    inference_geo: None


class AppliedEdit(ResponseModel):
    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class AppliedEdits(ResponseModel):
    applied_edits: list[AppliedEdit]


class TextContent(ResponseModel):
    type: Literal["text"]
    text: str
    citations: None = None  # absent at the beginning of a streamed block


class ThinkingContent(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class DirectCaller(ResponseModel):
    type: Literal["direct"]


class ToolUseContent(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller


Content = TextContent | ThinkingContent | ToolUseContent


class AnthropicMessage(ResponseModel):
    """The response to POST /v1/messages; in ``message_start`` it has no content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class MessageStart(ResponseModel):
    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(ResponseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextBlockDelta(ResponseModel):
    type: Literal["text_delta"]
    text: str


class ThinkingBlockDelta(ResponseModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ResponseModel):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(ResponseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(ResponseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputDelta


class ContentBlockStop(ResponseModel):
    type: Literal["content_block_stop"]
    index: int


class StopDetail(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStopDelta(ResponseModel):
    type: Literal["message_delta"]
    delta: StopDetail
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class MessageStop(ResponseModel):
    type: Literal["message_stop"]


class PingEvent(ResponseModel):
    type: Literal["ping"]


MessageEvent = (
    MessageStart
    | PingEvent
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageStopDelta
    | MessageStop
)


class TokenCount(ResponseModel):
    """The number of prompt tokens, with the model's chat template applied."""

    input_tokens: int
