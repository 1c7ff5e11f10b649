"""POST /v1/responses: the body, and its conversion to a chat completion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.config.sampling_fields import NUMBERS
from ..errors import invalid
from ..mcp.chat import McpChatRequest
from ..openai.chat_request import Verbosity
from ..openai.generation_body import Alternatives
from ..requests.body_errors import too_long
from ..requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ..requests.json_size import fits
from ..requests.sampling import SamplingBody
from .input_items import Item
from .tools import (
    ClientTool,
    ResponseTool,
    ResponseToolChoice,
    ResponseTools,
    chat_tool_choice,
)

MAX_METADATA = 16
MAX_KEY, MAX_VALUE = 64, 512  # of metadata
MAX_TOOLS = 1024
# Fields that a response repeats, and the size limit of each.
REPEATED = ("tools", "tool_choice", "text", "user", "safety_identifier", "prompt_cache_key")
MAX_REPEATED = 512 * 1024
# Fields that are passed to chat completions under the same names, and checked there.
SAME = (
    *NUMBERS,
    "model",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
    "logit_bias",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "include_reasoning",
    "structured_outputs",
    "chat_template_kwargs",
    "thinking_token_budget",
    "parallel_tool_calls",
)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED_REASONING)
# Names of chat completions' fields in this API, for errors.
FIELD_NAMES = (
    (re.compile(r"^tools(\[\d+\])\.function\b"), r"tools\1"),
    (re.compile(r"^tool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
)


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(BodyModel):
    """Options of the reasoning. Any kind of summary is accepted, but the reasoning itself is
    returned, as in vLLM."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextFormat(BodyModel):
    """The format of the text. Type ``json_schema`` needs a ``schema`` and its name."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(BodyModel):
    """Options of the text."""

    format: Annotated[dict[str, Any], DocumentedAs(TextFormat)] | None = None
    verbosity: Verbosity | None = None


class CreateResponseRequest(SamplingBody):
    """The body of POST /v1/responses. It has the sampling parameters of chat completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background_options": ({},),
        "context_management": (),
        "conversation": (),
        "ec_transfer_params": (),
        "image": (),
        "kv_transfer_params": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "moderation": (),
        "previous_input_messages": (),
        "prompt": (),
        "vllm_xargs": ({},),
    }

    model: Any = None
    input: Annotated[Any, DocumentedAs(str | list[dict[str, Any]])]
    background: bool = False
    enable_response_messages: bool = False
    include: Annotated[list[Any], Field(max_length=16), DocumentedAs(list[Literal[INCLUDABLE]])] = (
        Field(default_factory=list)
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] = Field(
        default_factory=dict
    )
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    reasoning: Annotated[dict[str, Any], DocumentedAs(ReasoningOptions)] = Field(
        default_factory=dict
    )
    store: bool = True
    stream: bool = False
    text: Annotated[dict[str, Any], DocumentedAs(TextConfig)] = Field(default_factory=dict)
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS), DocumentedAs(list[ResponseTool])] = (
        Field(default_factory=list)
    )
    tool_choice: Annotated[Any, DocumentedAs(ResponseToolChoice)] = None
    parallel_tool_calls: bool = True
    top_logprobs: Alternatives = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    seed: Any = None
    stop: Any = None
    ignore_eos: Any = None
    priority: Any = None
    cache_salt: Any = None
    logit_bias: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    include_reasoning: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None
    # No effect: obfuscation of streams, and fields for accounting.
    stream_options: Any = None
    client_metadata: Any = None
    service_tier: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


@dataclass(frozen=True, kw_only=True)
class ContinuedConversation:
    """``items`` is the input of the request; it follows the items of ``earlier`` responses. If
    ``is_partial``, the response is the rest of the last message."""

    earlier: list[Item]
    items: list[Item]
    is_partial: bool

    @property
    def all_items(self) -> list[Item]:
        return [*self.earlier, *self.items]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(McpChatRequest):
    """The chat completion for a response. ``client_tools`` are the tools that the client runs, by
    their names in the chat."""

    params: CreateResponseRequest
    client_tools: Mapping[str, ClientTool]
    conversation: ContinuedConversation


def check_response(params: CreateResponseRequest, ignored: set[str]) -> None:
    """Check the fields that chat completions do not check. Raises ``RequestError``."""
    for i, name in enumerate(params.include):
        if name not in INCLUDABLE:
            raise invalid(
                f"Invalid 'include[{i}]': {name!r:.64} is not supported by this server; use "
                f"{' or '.join(INCLUDABLE)}.",
                f"include[{i}]",
                "unsupported_value",
            )
    for name, value in params.metadata.items():
        if len(name) > MAX_KEY:
            raise too_long("metadata", name, MAX_KEY)
        if len(value) > MAX_VALUE:
            raise too_long(f"metadata.{name}", value, MAX_VALUE)
    for name in REPEATED:
        if not fits(getattr(params, name), MAX_REPEATED):
            message = f"Invalid '{name}': it has more than {MAX_REPEATED} characters and values."
            raise invalid(message, name, "too_large")
    if params.top_logprobs and LOGPROBS not in params.include:
        message = f"'top_logprobs' needs '{LOGPROBS}' in 'include'."
        raise invalid(message, "top_logprobs", "invalid_value")
    if params.background and not params.store:
        message = "background can only be used when `store` is true."
        raise invalid(message, "background", "invalid_value")
    if params.background and params.stream:
        message = "'stream' is not available with 'background'; leave one of the two out."
        raise invalid(message, "stream", "unsupported_value")
    ReasoningOptions.read(params.reasoning, ignored, "reasoning.", at="reasoning")
    TextConfig.read(params.text, ignored, "text.", at="text")


def chat_body(
    params: CreateResponseRequest,
    tools: ResponseTools,
    messages: list[dict[str, Any]],
    *,
    is_partial: bool,
) -> dict[str, Any]:
    """The body of the chat completion for a response. If ``is_partial``, it continues the last
    message."""
    body = {name: getattr(params, name) for name in SAME}
    body["messages"] = messages
    body["continue_final_message"] = is_partial
    body["max_completion_tokens"] = params.max_output_tokens
    body["reasoning_effort"] = params.reasoning.get("effort")
    body["verbosity"] = params.text.get("verbosity")
    body["response_format"] = _response_format(params.text.get("format"))
    body["return_token_ids"] = body["return_prompt_text"] = params.enable_response_messages
    body["tools"] = tools.chat
    body["tool_choice"] = chat_tool_choice(params.tool_choice)
    if LOGPROBS in params.include:
        body |= {"logprobs": True, "top_logprobs": params.top_logprobs}
    return body


def _response_format(layout: Any) -> Any:
    if not isinstance(layout, dict) or layout.get("type") != "json_schema":
        return layout
    schema = {name: value for name, value in layout.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
