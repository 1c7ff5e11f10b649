"""Ollama's bodies, translated into those of OpenAI's API.

A chat becomes a chat completion, a prompt a completion of token ids: Ollama cuts a prompt that is
too long in its middle, and continues the tokens of an earlier ``context``.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.config.sampling_fields import NUMBERS
from ...shared.text.reasoning import NO_PARSER
from ..errors import invalid
from ..generation import GenerationRequest
from ..openai.chat_messages import MAX_MESSAGES, MAX_TOOL_CALLS
from ..openai.chat_request import parse_chat
from ..openai.completion_request import parse_completion
from ..openai.generation_body import MAX_STOPS, StopString
from ..openai.logprob_fields import check_alternatives
from ..openai.request_fields import OpenAIRequest
from ..openai.structured_outputs import follow_reasoning
from ..openai.tools.definitions import Tools
from ..options import RouterOptions
from ..requests.body_errors import check_token, fields_renamed, wrong_type
from ..requests.body_model import INT32, INT64, WHOLE, BodyModel, DocumentedAs
from ..requests.context import ContextError, encode_chat, encode_text
from ..requests.fitting_turns import Messages, parse_fitting
from ..requests.reasoning_options import prompt_opens_reasoning, reasoning_of
from ..requests.sampling import body_with_numbers
from ..served_model import ServedModel

LATEST = ":latest"
MAX_LOGPROBS = 20  # as in Ollama
MAX_CONTEXT_TOKENS = 1 << 20
EFFORTS = ("low", "medium", "high")
# At the beginning of a prompt that is cut, by default.
KEPT_TOKENS = 4
# Ollama's names of sampling parameters, where they differ.
OWN_NAMES = {"repetition_penalty": "repeat_penalty"}
# The options that OpenAI's bodies have too, by their names there.
OPENAI_NAMES = {OWN_NAMES.get(name, name): name for name in (*NUMBERS, "seed", "stop")}
# OpenAI's fields, in errors.
FIELD_NAMES = (
    (re.compile(r"^(response_format|json_schema)\b.*"), "format"),
    (re.compile(r"^max_tokens$"), "options.num_predict"),
    *((re.compile(f"^{theirs}$"), f"options.{name}") for name, theirs in OPENAI_NAMES.items()),
)
# A duration of Go, such as 5m or 1h30m.
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")


if TYPE_CHECKING:
    OllamaNumbers = BodyModel
else:
    OllamaNumbers = body_with_numbers(OWN_NAMES)


class OllamaOptions(OllamaNumbers):
    """Sampling parameters; those without a value have the model's defaults."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "repeat_last_n": (-1, 64),
    }

    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1), WHOLE] | None = None
    # -1 and -2: as many as fit.
    num_predict: Annotated[int, Field(ge=-2, le=INT32 - 1), WHOLE] = -1
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    num_ctx: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    # Of a prompt that is cut; -1 is as much as possible.
    num_keep: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] = KEPT_TOKENS
    # Accepted without effect: how a model is loaded is the operator's choice here.
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    penalize_newline: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None

    def limited(self, model: ServedModel) -> ServedModel:
        """The model with a context of ``num_ctx`` tokens, in which an answer has ``num_predict``
        tokens, or as many of them as fit."""
        limit = min(self.num_ctx or model.max_model_len, model.max_model_len)
        most = self.num_predict if self.num_predict > 0 else model.defaults.max_tokens or limit
        defaults = replace(model.defaults, max_tokens=most)
        return replace(model, max_model_len=limit, defaults=defaults)


class OllamaBody(BodyModel):
    """The fields of all routes."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    options: Annotated[dict[str, Any], DocumentedAs(OllamaOptions)] = Field(default_factory=dict)
    keep_alive: Annotated[Any, DocumentedAs(str | float)] = None

    def read_options(self, model: ServedModel, ignored: set[str]) -> OllamaOptions:
        """The options, once the other fields of all routes are checked. Raises ``RequestError``,
        or ``ApiError`` 404 for another model."""
        check_name(self.model, model)
        _check_keep_alive(self.keep_alive)
        return OllamaOptions.read(self.options, ignored, "options.", at="options")


class OllamaGenerationBody(OllamaBody):
    """The fields of both routes that generate text."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "shift": (False,),  # nodes end an answer where its context is full
    }

    stream: bool = True
    think: Annotated[Any, DocumentedAs(bool | Literal[EFFORTS])] = None
    format: Annotated[Any, DocumentedAs(str | dict[str, Any])] = None
    truncate: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] = 0


class OllamaMessage(BodyModel):
    """A message of a chat."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}

    role: Annotated[str, Field(max_length=64)]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=MAX_TOOL_CALLS)] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaGenerationBody):
    """The body of POST /api/chat."""

    messages: Annotated[
        list[Any], Field(max_length=MAX_MESSAGES), DocumentedAs(list[OllamaMessage])
    ] = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)


class OllamaGenerateRequest(OllamaGenerationBody):
    """The body of POST /api/generate."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaGenerationBody.unsupported,
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
class OllamaRequest(OpenAIRequest):
    """A request with the name by which the client called the model. ``returns_context``: the
    answer ends with the tokens of prompt and answer."""

    asked_model: str
    returns_context: bool = False
    include_reasoning: bool = True

    @classmethod
    def of(
        cls, parsed: GenerationRequest, body: OllamaBody, model: ServedModel, ignored: set[str],
        **changes: Any,
    ) -> OllamaRequest:  # fmt: skip
        """The request that a translated ``body`` has become."""
        known = {field.name for field in fields(cls)}
        same = {f.name: getattr(parsed, f.name) for f in fields(parsed) if f.name in known}
        own = {
            "request_id": f"ollama-{uuid.uuid4().hex}",
            "asked_model": body.model,
            "model": model,
            "ignored": ignored | parsed.ignored,
        }
        return cls(**{**same, **own, **changes})


class OnlyLoadsError(Exception):
    """A request without a prompt, by which clients have a model loaded before they use it;
    ``content`` is the part of its answer that is empty."""

    def __init__(self, asked_model: str, content: dict[str, Any]) -> None:
        super().__init__("a request without a prompt")
        self.asked_model = asked_model
        self.content = content


def read_chat(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The chat completion of POST /api/chat. Raises ``RequestError``, or ``OnlyLoadsError``."""
    ignored: set[str] = set()
    asked = OllamaChatRequest.read(body, ignored)
    sampling = asked.read_options(model, ignored)
    messages = [_message(m, f"messages[{i}]", ignored) for i, m in enumerate(asked.messages)]
    chat = _generation_body(asked, sampling, model, options) | {
        "chat_template_kwargs": _variables(asked, model, options),
        "tools": asked.tools,
        "logprobs": asked.logprobs,
        "top_logprobs": asked.top_logprobs,
    }
    if not messages:
        raise OnlyLoadsError(asked.model, {"message": {"role": "assistant", "content": ""}})
    limited = sampling.limited(model)

    def parse(kept: Messages) -> GenerationRequest:
        return parse_chat(chat | {"messages": kept}, limited, options)

    with errors_of_ollama(limited):
        cut = asked.truncate
        parsed = parse_fitting(messages, parse, whole_turns=False) if cut else parse(messages)
    return _request(parsed, asked, model, ignored)


def read_generate(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The completion of POST /api/generate. Raises ``RequestError``, or ``OnlyLoadsError``."""
    ignored: set[str] = set()
    asked = OllamaGenerateRequest.read(body, ignored)
    sampling = asked.read_options(model, ignored)
    for i, token in enumerate(asked.context):
        check_token(f"context[{i}]", token, model.vocab_size)
    templated = not (asked.raw or asked.suffix)
    completion = _generation_body(asked, sampling, model, options) | {
        "logprobs": asked.top_logprobs if asked.logprobs else None,
        "return_token_ids": templated,
    }
    if not (asked.prompt or asked.suffix):
        raise OnlyLoadsError(asked.model, {"response": ""})
    limited = sampling.limited(model)
    with errors_of_ollama(limited):
        prompt = _prompt(asked, sampling.num_keep, model, limited, options)
        given = {"prompt": prompt, "suffix": asked.suffix}
        parsed = parse_completion(completion | given, limited, options)
    if templated:
        parser = reasoning_of(model, options)
        opened = prompt_opens_reasoning(parser, parsed.prompts[0].tokens, model)
        text = replace(parsed.text, reasoning_parser=parser, reasoning_opened=opened)
        follow_reasoning(parsed.sampling, parser, opened)
        parsed = replace(parsed, text=text)
    return _request(parsed, asked, model, ignored, returns_context=templated)


def check_name(name: str, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 for another model. Ollama's names end with a tag."""
    model.check_name(name.removesuffix(LATEST))


@contextmanager
def errors_of_ollama(limited: ServedModel) -> Iterator[None]:
    """Errors of a translated body, by the names of Ollama's fields."""
    try:
        with fields_renamed(FIELD_NAMES):
            yield
    except ContextError:
        message = (
            f"the input length exceeds the context length of {limited.max_model_len} tokens; "
            "shorten it, or raise 'num_ctx' if the model takes more"
        )
        raise invalid(message, "num_ctx", "context_length_exceeded") from None


def _generation_body(
    asked: OllamaGenerationBody, sampling: OllamaOptions, model: ServedModel, options: RouterOptions
) -> dict[str, Any]:
    """The fields that chat completions and completions have in common."""
    if asked.top_logprobs and not asked.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true", "top_logprobs")
    check_alternatives("top_logprobs", asked.top_logprobs, options)
    body = {theirs: getattr(sampling, name) for name, theirs in OPENAI_NAMES.items()}
    body["stream"] = asked.stream
    if asked.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(asked.format, dict):
        body["json_schema"] = asked.format
    elif asked.format not in (None, ""):
        message = f'invalid format: {asked.format!r:.64}; expected "json" or a JSON schema'
        raise invalid(message, "format")
    return body


def _request(
    parsed: GenerationRequest, asked: OllamaGenerationBody, model: ServedModel, ignored: set[str],
    **changes: Any,
) -> OllamaRequest:  # fmt: skip
    constrained = parsed.sampling.structured_outputs
    if constrained.param in ("response_format", "json_schema"):
        constrained.param = "format"
    wanted = asked.think is not False
    own = {"include_usage": True, "include_reasoning": wanted}
    return OllamaRequest.of(parsed, asked, model, ignored, **own, **changes)


def _prompt(
    asked: OllamaGenerateRequest, kept: int, model: ServedModel, limited: ServedModel,
    options: RouterOptions,
) -> str | list[int]:  # fmt: skip
    """The prompt of the completion: tokens that fit, or the text before a gap. Raises
    ``RequestError``."""
    if asked.raw or asked.suffix:
        for name, unavailable in (("system", asked.system), ("context", asked.context)):
            if unavailable:
                mode = "raw mode" if asked.raw else "a request with 'suffix'"
                raise invalid(f"{mode} does not support template, system, or context", name)
        if asked.suffix:
            return asked.prompt
        tokens = encode_text(asked.prompt, model, param="prompt", truncated=asked.truncate)
    else:
        turns = [{"role": "system", "content": asked.system}] if asked.system else []
        turns.append({"role": "user", "content": asked.prompt})
        variables = _variables(asked, model, options)
        tokens = encode_chat(turns, model, variables=variables, truncated=asked.truncate)
    return _fitting(asked.context + tokens, kept, limited, cut=asked.truncate)


def _fitting(tokens: list[int], kept: int, limited: ServedModel, *, cut: bool) -> list[int]:
    """The beginning and the end of a prompt, without its middle if it is too long. Raises
    ``ContextError`` if it may not be cut, or if not even a token fits."""
    room = limited.max_model_len - 1  # for the answer
    if len(tokens) <= room:
        return tokens
    if not cut or not room:
        raise ContextError("too long", param="prompt", length=len(tokens), requested=1)
    kept = min(limited.max_model_len if kept < 0 else kept, limited.max_model_len // 2)
    return tokens[:kept] + tokens[len(tokens) - (room - kept) :]


def _variables(
    asked: OllamaGenerationBody, model: ServedModel, options: RouterOptions
) -> dict[str, Any]:
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
    message = OllamaMessage.read(item, ignored, "messages[].", at=param)
    return {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.thinking,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": message.tool_calls,
    }


def _check_keep_alive(given: Any) -> None:
    """The model stays loaded as long as its operator wants, so any time is honoured; unloading it
    is not. Raises ``RequestError``."""
    if given is None:
        return
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number and not (isinstance(given, str) and _DURATION.fullmatch(given[:64])):
        message = f"invalid keep_alive: {given!r:.64}; expected seconds or a duration such as '5m'"
        raise invalid(message, "keep_alive")
    digits = str(given) if number else re.sub(r"[^\d]", "", given)
    if float(digits) == 0:
        message = "'keep_alive': 0 is not supported: clients of this server cannot unload its model"
        raise invalid(message, "keep_alive", "unsupported_value")
