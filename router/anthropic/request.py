"""POST /v1/messages and its count_tokens: from the body to a ``GenerationRequest``, or to the
length of the prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ..generation import EncodedPrompt, GenerationRequest, TextOptions, new_tokens
from ..openai.structured_outputs import follow_reasoning
from ..openai.tools.definitions import NO_TOOLS, ToolRequest, read_tools
from ..options import RouterOptions
from ..requests.body_model import BOUNDED, INT32, WHOLE
from ..requests.context import ContextError, check_context
from ..requests.reasoning_options import limit_thinking, prompt_opens_reasoning, reasoning_of
from ..requests.response_size import ResponseSize
from ..requests.sampling import sampling_message
from ..served_model import ServedModel
from .prompt import MessagePrompt, PromptBody, prompt_errors, read_prompt

StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class MessagesRequest(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE]
    stream: bool = False
    stop_sequences: Annotated[list[StopSequence], Field(max_length=64)] = Field(
        default_factory=list
    )
    temperature: Annotated[float, Field(ge=0, le=1), BOUNDED] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), BOUNDED] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] | None = None
    # Accepted without effect: they are for Anthropic's own accounting and diagnosis.
    metadata: Any = None
    service_tier: Any = None
    diagnostics: Any = None
    billing_policy: Any = None


class CountTokensRequest(PromptBody):
    """The body of POST /v1/messages/count_tokens: a message's without sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(GenerationRequest):
    """A request, and what its response needs. ``omit_thinking`` leaves the blocks of reasoning
    empty."""

    include_reasoning: bool = True
    omit_thinking: bool = False
    applied_edits: Sequence[dict[str, Any]] | None = None


def parse_messages(body: Any, model: ServedModel, options: RouterOptions) -> MessageRequest:
    """Check a body, render the chat template, tokenize. Raises ``RequestError``."""
    ignored: set[str] = set()
    request = MessagesRequest.read(body, ignored)
    model.check_name(request.model)
    prompt = read_prompt(request, model, ignored, max_tokens=request.max_tokens)
    tools = _tools(prompt, model, options, ignored)
    with prompt_errors(model):
        tokens = prompt.encode(model)
        max_tokens = check_context(
            [len(tokens)], request.max_tokens, model, param="messages", default=1
        )
    _check_size(len(tokens), max_tokens, request, options)
    reasoning = reasoning_of(model, options)
    opened = False if prompt.prefilled else prompt_opens_reasoning(reasoning, tokens, model)
    numbers = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    sampling = sampling_message(model, numbers, n=1)
    if prompt.format is not None:
        sampling.structured_outputs.CopyFrom(prompt.format)
    tools.constrain(sampling)
    follow_reasoning(sampling, reasoning, opened)
    budget = prompt.thinking.budget_tokens
    param = "thinking.budget_tokens"
    limit_thinking(sampling, budget, reasoning, opened, tools.use, model, param=param)
    return MessageRequest(
        request_id=f"msg_{uuid.uuid4().hex}",
        model=model,
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=max_tokens,
        sampling=sampling,
        text=TextOptions(
            stop=StopStrings(request.stop_sequences),
            reasoning_parser=reasoning,
            reasoning_opened=opened,
            tools=tools.use,
        ),
        stream=request.stream,
        include_reasoning=prompt.thinking.enabled,
        omit_thinking=prompt.thinking.display == "omitted",
        applied_edits=_edits(request, prompt),
        ignored=ignored,
    )


def count_prompt_tokens(body: Any, model: ServedModel, ignored: set[str]) -> dict[str, Any]:
    """The response to POST /v1/messages/count_tokens. Raises ``RequestError``."""
    request = CountTokensRequest.read(body, ignored)
    model.check_name(request.model)
    prompt = read_prompt(request, model, ignored)
    try:
        return {"input_tokens": len(prompt.encode(model, counted=True))}
    except ContextError as error:
        return {"input_tokens": error.length}


def _tools(
    prompt: MessagePrompt, model: ServedModel, options: RouterOptions, ignored: set[str]
) -> ToolRequest:
    if not prompt.tools or prompt.choice.type == "none":
        return NO_TOOLS
    parallel = not prompt.choice.disable_parallel_tool_use
    choice = prompt.choice.as_openai()
    return read_tools(
        prompt.tools,
        choice,
        parallel,
        model,
        options,
        ignored,
        schema_place="tools.{}.input_schema",
    )


def _check_size(
    length: int, max_tokens: list[int], request: MessagesRequest, options: RouterOptions
) -> None:
    size = ResponseSize(
        prompts=[length],
        n=1,
        logprobs=None,
        prompt_alternatives=None,
        echoed=0,
        token_ids=False,
        stream=request.stream,
        copies=1 if options.reasoning_parser == NO_PARSER else 2,
    )
    size.check(max_tokens, options)


def _edits(request: MessagesRequest, prompt: MessagePrompt) -> Sequence[dict[str, Any]] | None:
    """The applied edits, for a request that mentions context management."""
    return prompt.applied_edits if request.context_management else None
