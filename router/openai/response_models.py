"""OpenAI's responses, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from ..requests.body_model import ResponseModel


class OpenAIErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(ResponseModel):
    """An error, also as the last event of a stream."""

    error: OpenAIErrorDetail


class CachedTokens(ResponseModel):
    cached_tokens: int


class ReasoningTokens(ResponseModel):
    reasoning_tokens: int


class TokenUsage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None  # not in continuous usage
    completion_tokens_details: ReasoningTokens | None = None


class PlacementDetail(ResponseModel):
    """The nodes that served a request: an extension beside OpenAI's fields."""

    decode_nodes: list[str]
    prefill_nodes: list[str]
    remote_tokens: int


class RankedToken(ResponseModel):
    """vLLM's entry of ``prompt_logprobs``."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsList = list[dict[str, RankedToken] | None]


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class ResponseFunction(ResponseModel):
    name: str
    arguments: str


class ResponseToolCall(ResponseModel):
    """A tool call; ``arguments`` is JSON as the model wrote it."""

    id: str
    type: Literal["function"]
    function: ResponseFunction


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "error"]


class ChoiceError(ResponseModel):
    """The error that ended one of several choices: an extension, in the shape of OpenAI's
    errors."""

    message: str
    type: str
    param: str | None
    code: str | None


class ExecutedMcpCall(ResponseModel):
    """A call to an MCP server's tool that the router has run: an extension, in the shape of the
    Responses API's items."""

    id: str
    type: Literal["mcp_call"]
    server_label: str
    name: str
    arguments: str
    status: Literal["completed", "failed"]
    output: str | None
    error: dict[str, Any] | None


class ResponseMessage(ResponseModel):
    role: str
    content: str | None
    refusal: None
    annotations: list[str]  # none
    tool_calls: list[ResponseToolCall] | None = None
    function_call: ResponseFunction | None = None
    mcp_calls: list[ExecutedMcpCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(ResponseModel):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: ChoiceError | None = None
    token_ids: list[int] | None


class RequestTimes(ResponseModel):
    """With --enable-per-request-metrics. Tokens per second are measured up to the last token."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    tokens_per_second: float
    mean_itl_ms: float | None = None


class ChatCompletion(ResponseModel):
    """The response to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: TokenUsage
    tandem: PlacementDetail
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    prompt_logprobs: PromptLogprobsList | None
    metrics: RequestTimes | None = None


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """New output of a tool call. Its id, type and name come once, with its first delta."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(ResponseModel):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None
    mcp_calls: list[ExecutedMcpCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    error: ChoiceError | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    """The data of each event of a streamed chat completion, except the last, ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    usage: TokenUsage | None = None
    tandem: PlacementDetail | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: RequestTimes | None = None


class TextLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChunkChoice(ResponseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "error"] | None
    stop_reason: str | int | None = None
    error: ChoiceError | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextChoice(TextChunkChoice):
    prompt_logprobs: PromptLogprobsList | None


class TextCompletion(ResponseModel):
    """The response to POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: TokenUsage
    tandem: PlacementDetail
    metrics: RequestTimes | None = None


class TextCompletionChunk(ResponseModel):
    """The data of each event of a streamed completion, except the last, ``[DONE]``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: str | None = None
    usage: TokenUsage | None = None
    tandem: PlacementDetail | None = None
    metrics: RequestTimes | None = None
