"""Anthropic's answers, as /openapi.json documents them."""

from __future__ import annotations

from typing import Literal

from ..requests.body_model import AnswerModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class AnthropicErrorDetail(AnswerModel):
    type: str
    message: str


class AnthropicError(AnswerModel):
    """An error, also as the last event of a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class MessageUsage(AnswerModel):
    input_tokens: int
    output_tokens: int


class TextContent(AnswerModel):
    type: Literal["text"]
    text: str


class AnthropicMessage(AnswerModel):
    """The answer of POST /v1/messages; ``message_start`` has one without content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(AnswerModel):
    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(AnswerModel):
    type: Literal["content_block_start"]
    index: int
    content_block: TextContent


class TextBlockDelta(AnswerModel):
    type: Literal["text_delta"]
    text: str


class ContentBlockDelta(AnswerModel):
    type: Literal["content_block_delta"]
    index: int
    delta: TextBlockDelta


class ContentBlockStop(AnswerModel):
    type: Literal["content_block_stop"]
    index: int


class StopDetail(AnswerModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStopDelta(AnswerModel):
    type: Literal["message_delta"]
    delta: StopDetail
    usage: MessageUsage


class MessageStop(AnswerModel):
    type: Literal["message_stop"]


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageStopDelta
    | MessageStop
)
