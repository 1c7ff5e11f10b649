"""POST /v1/chat/completions: from the body to a ``ChatRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ...shared.text.chat_template import ChatTemplate
from ...shared.text.reasoning import NO_PARSER
from ..errors import invalid
from ..generation import EncodedPrompt, TextOptions, new_tokens
from ..options import RouterOptions
from ..requests.body_model import INT32, NAMED_BOOLEAN, WHOLE
from ..requests.context import (
    ContextError,
    TemplateVariables,
    check_context,
    check_template_variables,
    encode_chat,
)
from ..requests.reasoning_options import limit_thinking, prompt_opens_reasoning, reasoning_of
from ..requests.response_size import ResponseSize
from ..requests.truncation import max_prompt_tokens, read_truncation
from ..served_model import ServedModel
from .chat_messages import Messages, read_messages
from .generation_body import COMMON_UNSUPPORTED, Alternatives, GenerationBody, check_alternatives
from .prompt_template import MAX_TEMPLATE, adds_generation_prompt, read_template
from .request_fields import (
    OpenAIRequest,
    check_min_tokens,
    listed_logprobs,
    read_shared,
    read_text_options,
)
from .structured_outputs import follow_reasoning
from .tools.definitions import FunctionChoice, Functions, ToolChoice, ToolRequest, Tools, read_tools
from .tools.function_calls import as_tool_choice, as_tools, asks_for_functions, functions_in_errors
from .tools.grammars import NO_GRAMMARS, ToolGrammars

MAX_DOCUMENTS = 1024
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = COMMON_UNSUPPORTED | {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


Verbosity = Literal["low", "medium", "high"]


class ChatCompletionRequest(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = CHAT_UNSUPPORTED

    logprobs: Annotated[bool, NAMED_BOOLEAN] = False
    top_logprobs: Alternatives | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    messages: Messages
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    reasoning_effort: Annotated[str, Field(max_length=64)] = ""
    verbosity: Verbosity | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    documents: Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS)] = Field(
        default_factory=list
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    add_special_tokens: bool = False
    include_reasoning: bool = True
    return_prompt_text: bool = False
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    functions: Functions = Field(default_factory=list)
    function_call: FunctionChoice = None
    # Accepted without effect: there are no predictions and no storage.
    prediction: Any = None
    store: Any = None
    service_tier: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(OpenAIRequest):
    """A chat, and what its response needs: ``opening_text`` starts each choice and is not
    generated, ``prompt_text`` is returned. With ``function_calls``, tool calls have the shape of
    OpenAI's former functions."""

    role: str = "assistant"
    opening_text: str = ""
    prompt_text: str | None = None
    include_reasoning: bool = True
    function_calls: bool = False


def parse_chat(
    body: Any, model: ServedModel, options: RouterOptions, grammars: ToolGrammars = NO_GRAMMARS
) -> ChatRequest:
    """Check a body, render the chat template, tokenize. ``grammars`` are keyed by function name.
    Raises ``RequestError``."""
    ignored: set[str] = set()
    chat = ChatCompletionRequest.read(body, ignored)
    shared = read_shared(chat, ignored, model, options)
    template = read_template(chat.chat_template, model, options)
    former = asks_for_functions(chat)
    tools = _tools(chat, model, options, ignored, template, former=former, grammars=grammars)
    text = read_text_options(chat, reasoning_parser=reasoning_of(model, options), tools=tools.use)
    logprobs = _logprobs(chat, options)
    requested = _max_tokens(chat)
    messages = read_messages(chat.messages, ignored)
    max_prompt = max_prompt_tokens(model, requested or 1)
    tokens = _prompt(chat, messages, model, tools, template, max_prompt)
    prompt_text = None
    if chat.return_prompt_text:
        prompt_text = model.tokenizer.decode(tokens, skip_special_tokens=False)
    role = "assistant" if adds_generation_prompt(chat) else messages[-1]["role"]
    opening = messages[-1]["content"] if chat.echo and role == messages[-1]["role"] else ""
    max_tokens = check_context(
        [len(tokens)], requested, model, param="messages", default=model.max_model_len
    )
    size = ResponseSize(
        prompts=[len(tokens)],
        n=shared["sampling"].n,
        logprobs=listed_logprobs(logprobs, chat),
        prompt_alternatives=shared["prompt_logprobs"],
        echoed=len(opening) + len(prompt_text or ""),
        token_ids=chat.return_token_ids,
        stream=chat.stream,
        # reasoning is written under two names
        copies=1 if text.reasoning_parser == NO_PARSER else 2,
    )
    if requested is None:
        max_tokens = size.fit(max_tokens, options)
    size.check(max_tokens, options)
    check_min_tokens(text.min_tokens, max_tokens)
    text = _continuing_prompt(text, tokens, model)
    if shared["beams"] and tools.forced is not None:
        message = "Calls cannot be forced in a beam search; use 'tool_choice' 'auto' or 'none'."
        raise invalid(message, "tool_choice", "unsupported_value")
    _constrain(shared["sampling"], chat, tools, text, model)
    return ChatRequest(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=max_tokens,
        text=text,
        logprobs=logprobs,
        ignored=ignored,
        role=role,
        opening_text=opening,
        prompt_text=prompt_text,
        include_reasoning=_include_reasoning(chat, text),
        function_calls=former,
        **shared,
    )


def count_chat_tokens(body: Any, model: ServedModel, options: RouterOptions) -> int:
    """The length of a chat's prompt, which may exceed the context. Raises ``RequestError``."""
    ignored: set[str] = set()
    chat = ChatCompletionRequest.read(body, ignored)
    model.check_name(chat.model)
    template = read_template(chat.chat_template, model, options)
    tools = _tools(chat, model, options, ignored, template, former=asks_for_functions(chat))
    messages = read_messages(chat.messages, ignored)
    try:
        return len(_encoded(chat, messages, model, tools, template, counted=True))
    except ContextError as error:
        return error.length


def _tools(
    chat: ChatCompletionRequest,
    model: ServedModel,
    options: RouterOptions,
    ignored: set[str],
    template: ChatTemplate | None,
    *,
    former: bool,
    grammars: ToolGrammars = NO_GRAMMARS,
) -> ToolRequest:
    """The tools of a request. Former functions make one call at a time."""
    tools, choice, parallel = chat.tools, chat.tool_choice, chat.parallel_tool_calls
    if former:
        tools, choice = as_tools(chat.functions), as_tool_choice(chat.function_call)
    with functions_in_errors(former=former):
        parallel = parallel and not former
        return read_tools(
            tools, choice, parallel, model, options, ignored, template, grammars=grammars
        )


def _prompt(
    chat: ChatCompletionRequest,
    messages: list[dict[str, Any]],
    model: ServedModel,
    tools: ToolRequest,
    template: ChatTemplate | None,
    limit: int,
) -> list[int]:
    """The tokens of the prompt, truncated to at most ``limit`` if the request asks for it."""
    truncation = read_truncation(chat, limit)
    tokens = _encoded(chat, messages, model, tools, template, counted=truncation is not None)
    return tokens if truncation is None else truncation.cut(tokens)


def _encoded(
    chat: ChatCompletionRequest,
    messages: list[dict[str, Any]],
    model: ServedModel,
    tools: ToolRequest,
    template: ChatTemplate | None,
    *,
    counted: bool,
) -> list[int]:
    """All tokens of the prompt. One that is ``counted`` or truncated may exceed the context."""
    return encode_chat(
        messages,
        model,
        variables=_template_variables(chat),
        tools=tools.definitions,
        add_generation_prompt=adds_generation_prompt(chat),
        add_special_tokens=chat.add_special_tokens,
        continue_final_message=chat.continue_final_message,
        template=template,
        truncated=counted,
    )


def _constrain(
    sampling: pb.Sampling,
    chat: ChatCompletionRequest,
    tools: ToolRequest,
    text: TextOptions,
    model: ServedModel,
) -> None:
    tools.constrain(sampling)
    parser, opened = text.reasoning_parser, text.reasoning_opened
    follow_reasoning(sampling, parser, opened)
    budget = _thinking_budget(chat, text)
    param = "thinking_token_budget"
    limit_thinking(sampling, budget, parser, opened, tools.use, model, param=param)


def _continuing_prompt(text: TextOptions, tokens: Sequence[int], model: ServedModel) -> TextOptions:
    """The text options for an output that continues this prompt."""
    opened = prompt_opens_reasoning(text.reasoning_parser, tokens, model)
    return replace(text, reasoning_opened=opened)


def _template_variables(chat: ChatCompletionRequest) -> dict[str, Any]:
    overrides = check_template_variables(chat.chat_template_kwargs)
    effort = chat.reasoning_effort
    # As in vLLM; templates without these variables are not affected.
    variables: dict[str, Any] = {}
    if effort:
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if chat.verbosity is not None:
        variables["verbosity"] = chat.verbosity
    if chat.documents:
        variables["documents"] = chat.documents
    return variables | overrides


def _include_reasoning(chat: ChatCompletionRequest, text: TextOptions) -> bool:
    if not chat.include_reasoning and text.reasoning_parser == NO_PARSER:
        message = "'include_reasoning' needs a router with --reasoning-parser."
        raise invalid(message, "include_reasoning", "unsupported_value")
    return chat.include_reasoning


def _thinking_budget(chat: ChatCompletionRequest, text: TextOptions) -> int | None:
    budget = chat.thinking_token_budget
    if budget in (None, -1):  # -1: no limit, as in vLLM
        return None
    if text.reasoning_parser == NO_PARSER:
        message = "'thinking_token_budget' needs a router with --reasoning-parser."
        raise invalid(message, "thinking_token_budget", "unsupported_value")
    if chat.use_beam_search:
        message = "'thinking_token_budget' is not available with 'use_beam_search'."
        raise invalid(message, "thinking_token_budget", "unsupported_value")
    return budget


def _logprobs(chat: ChatCompletionRequest, options: RouterOptions) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        message = "'top_logprobs' is only allowed when 'logprobs' is enabled."
        raise invalid(message, "top_logprobs")
    if chat.logprob_token_ids and not chat.logprobs:
        message = "'logprob_token_ids' is only allowed when 'logprobs' is enabled."
        raise invalid(message, "logprob_token_ids")
    check_alternatives("top_logprobs", chat.top_logprobs, options)
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _max_tokens(chat: ChatCompletionRequest) -> int | None:
    old, new = chat.max_tokens, chat.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' contradict each other; set one of them.",
            "max_tokens",
        )
    return old if new is None else new
