"""POST /api/chat and /api/generate: from bodies to an ``OllamaRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ..errors import invalid
from ..generation import EncodedPrompt, TextOptions, new_tokens
from ..openai.chat_messages import read_messages
from ..openai.chat_request import ChatRequest
from ..openai.structured_outputs import follow_reasoning
from ..openai.tools.chat_tools import Tools, read_tools
from ..options import RouterOptions
from ..requests.body_errors import check_token, wrong_type
from ..requests.body_model import WHOLE, BodyModel, DocumentedAs
from ..requests.context import encode_around_gap, encode_chat, encode_text
from ..requests.reasoning_options import prompt_opens_reasoning, reasoning_of
from ..requests.response_size import ResponseSize
from ..served_model import ServedModel
from .load_request import OnlyLoadsError
from .loaded_time import check_keep_alive
from .ollama_format import read_format
from .ollama_options import OllamaOptions
from .ollama_prompt import Turns, context_of, fitting_chat, fitting_text

LATEST = ":latest"
MAX_MESSAGES = 16_384
MAX_LOGPROBS = 20  # as in Ollama
MAX_CONTEXT_TOKENS = 1 << 20
EFFORTS = ("low", "medium", "high")


class OllamaBody(BodyModel):
    """The fields of both routes."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "shift": (False,),  # nodes end an answer where its context is full
    }

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    stream: bool = True
    options: Annotated[dict[str, Any], DocumentedAs(OllamaOptions)] = Field(default_factory=dict)
    think: Annotated[Any, DocumentedAs(bool | Literal[EFFORTS])] = None
    format: Annotated[Any, DocumentedAs(str | dict[str, Any])] = None
    keep_alive: Annotated[Any, DocumentedAs(str | float)] = None
    truncate: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] = 0


class OllamaMessage(BodyModel):
    """A message of a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    role: Annotated[str, Field(max_length=64)]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=1024)] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaBody):
    """The body of POST /api/chat."""

    messages: Annotated[
        list[Any], Field(max_length=MAX_MESSAGES), DocumentedAs(list[OllamaMessage])
    ] = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)


class OllamaGenerateRequest(OllamaBody):
    """The body of POST /api/generate."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaBody.unsupported,
        "template": ("",),
    }

    prompt: str = ""
    system: str = ""
    suffix: str = ""
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT_TOKENS)] = Field(
        default_factory=list
    )
    raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(ChatRequest):
    """A request with the name by which the client called the model. ``returns_context``: the
    answer ends with the tokens of prompt and answer."""

    asked_model: str
    returns_context: bool = False


def parse_chat(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """Check a body, render the chat template, tokenize. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = OllamaChatRequest.read(body, ignored)
    check_name(asked.model, model)
    messages = [_message(m, f"messages[{i}]", ignored) for i, m in enumerate(asked.messages)]
    given = _options(asked, ignored)
    if not messages:
        raise OnlyLoadsError(asked.model, {"message": {"role": "assistant", "content": ""}})
    tools = read_tools(asked.tools, None, True, model, options, ignored)
    turns = read_messages(messages, ignored)
    variables = _variables(asked, model, options)

    def encode(kept: Turns) -> list[int]:
        return encode_chat(
            kept, model, variables=variables, tools=tools.shown, truncated=asked.truncate
        )

    limit = context_of(given, model)
    tokens = fitting_chat(turns, encode, limit, truncate=asked.truncate)
    text = {"reasoning_parser": reasoning_of(model, options), "tools": tools.use}
    return _request(asked, given, tokens, text, model, options, ignored)


def parse_generate(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """Check a body, render the chat template unless it is raw, tokenize."""
    ignored: set[str] = set()
    asked = OllamaGenerateRequest.read(body, ignored)
    check_name(asked.model, model)
    given = _options(asked, ignored)
    for i, token in enumerate(asked.context):
        check_token(f"context[{i}]", token, model.vocab_size)
    if not (asked.prompt or asked.suffix):
        raise OnlyLoadsError(asked.model, {"response": ""})
    plain = asked.raw or bool(asked.suffix)
    tokens = _plain(asked, model) if plain else _templated(asked, model, options)
    limit = context_of(given, model)
    cut = asked.truncate and not asked.suffix  # the middle of its prompt is the gap
    tokens = fitting_text(asked.context + tokens, given, limit, truncate=cut)
    text = {} if plain else {"reasoning_parser": reasoning_of(model, options)}
    made = _request(asked, given, tokens, text, model, options, ignored, context=not plain)
    if asked.suffix and model.tokenizer.fill_in_middle is not None:
        made.sampling.stop_token_ids.extend(model.tokenizer.fill_in_middle.ends)
    return made


def _plain(asked: OllamaGenerateRequest, model: ServedModel) -> list[int]:
    """The tokens of a prompt without a template, or of one with a gap in it."""
    for name, unavailable in (("system", asked.system), ("context", asked.context)):
        if unavailable:
            mode = "raw mode" if asked.raw else "a request with 'suffix'"
            raise invalid(f"{mode} does not support template, system, or context", name)
    if asked.suffix:
        return encode_around_gap(asked.prompt, asked.suffix, model)
    return encode_text(asked.prompt, model, param="prompt", truncated=asked.truncate)


def _templated(
    asked: OllamaGenerateRequest, model: ServedModel, options: RouterOptions
) -> list[int]:
    turns = [{"role": "system", "content": asked.system}] if asked.system else []
    turns.append({"role": "user", "content": asked.prompt})
    variables = _variables(asked, model, options)
    return encode_chat(turns, model, variables=variables, truncated=asked.truncate)


def check_name(name: str, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 for another model. Ollama's names end with a tag."""
    model.check_name(name.removesuffix(LATEST))


def _options(asked: OllamaBody, ignored: set[str]) -> OllamaOptions:
    check_keep_alive(asked.keep_alive)
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true", "top_logprobs")
    return OllamaOptions.read(asked.options, ignored, "options.", at="options")


def _request(
    asked: OllamaBody, given: OllamaOptions, tokens: list[int], text: dict[str, Any],
    model: ServedModel, options: RouterOptions, ignored: set[str], *, context: bool = False,
) -> OllamaRequest:  # fmt: skip
    wanted = given.max_tokens
    room = context_of(given, model) - len(tokens)
    most = wanted or model.defaults.max_tokens or room
    granted = [model.defaults.within(min(most, room))]
    size = ResponseSize(
        prompts=[len(tokens)],
        n=1,
        logprobs=asked.top_logprobs if asked.logprobs else None,
        prompt_alternatives=None,
        echoed=0,
        token_ids=context,
        stream=asked.stream,
    )
    if wanted is None:
        granted = size.fit(granted, options)
    size.check(granted, options)
    parser = text.get("reasoning_parser", NO_PARSER)
    opened = prompt_opens_reasoning(parser, tokens, model)
    sampling = given.sampling(model)
    if (form := read_format(asked.format)) is not None:
        sampling.structured_outputs.CopyFrom(form)
        follow_reasoning(sampling, parser, opened)
    return OllamaRequest(
        request_id=f"ollama-{uuid.uuid4().hex}",
        asked_model=asked.model,
        model=model,
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=granted,
        sampling=sampling,
        text=TextOptions(stop=StopStrings(given.stop), reasoning_opened=opened, **text),
        stream=asked.stream,
        include_usage=True,
        include_reasoning=asked.think is not False,
        logprobs=asked.top_logprobs if asked.logprobs else None,
        return_token_ids=context,
        returns_context=context,
        ignored=ignored,
    )


def _variables(asked: OllamaBody, model: ServedModel, options: RouterOptions) -> dict[str, Any]:
    """The variables by which templates turn reasoning on and off."""
    think = asked.think
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in EFFORTS:
        message = f"Invalid value for 'think': must be true, false, or one of {EFFORTS}."
        raise invalid(message, "think")
    if think and reasoning_of(model, options) == NO_PARSER:
        raise invalid(f'"{asked.model}" does not support thinking', "think")
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"enable_thinking": bool(think), "thinking": bool(think), **effort}


def _message(item: Any, param: str, ignored: set[str]) -> dict[str, Any]:
    """A message in OpenAI's form."""
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    read = OllamaMessage.read(item, ignored, "messages[].", at=param)
    made: dict[str, Any] = {"role": read.role, "content": read.content}
    named = (
        ("reasoning_content", read.thinking),
        ("name", read.tool_name),
        ("tool_call_id", read.tool_call_id),
        ("tool_calls", read.tool_calls or None),
    )
    return made | {name: value for name, value in named if value is not None}
