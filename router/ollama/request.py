"""Ollama's bodies, translated into those of OpenAI's API.

A chat becomes a chat completion, a prompt a completion of token ids: Ollama cuts the middle out of
a prompt that is too long, and continues the tokens of an earlier ``context``.
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
from ..openai.generation_body import MAX_STOPS, StopString, check_alternatives
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
# The default number of tokens to keep at the beginning of a truncated prompt.
DEFAULT_KEEP = 4
# Ollama's names of sampling parameters, where they differ.
OWN_NAMES = {"repetition_penalty": "repeat_penalty"}
# Options that OpenAI's API has too: Ollama's names to OpenAI's.
OPENAI_NAMES = {OWN_NAMES.get(name, name): name for name in (*NUMBERS, "seed", "stop")}
# Ollama's names of OpenAI's fields, for errors.
FIELD_NAMES = (
    (re.compile(r"^(response_format|json_schema)\b.*"), "format"),
    (re.compile(r"^max_tokens$"), "options.num_predict"),
    *(
        (re.compile(f"^{openai_name}$"), f"options.{name}")
        for name, openai_name in OPENAI_NAMES.items()
    ),
)
# A Go duration, such as 5m or 1h30m.
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")


if TYPE_CHECKING:
    OllamaNumbers = BodyModel
else:
    OllamaNumbers = body_with_numbers(OWN_NAMES)


class OllamaOptions(OllamaNumbers):
    """Sampling parameters. Unset ones take the model's defaults."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "repeat_last_n": (-1, 64),
    }

    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1), WHOLE] | None = None
    # -1 and -2: no limit.
    num_predict: Annotated[int, Field(ge=-2, le=INT32 - 1), WHOLE] = -1
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    num_ctx: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    # The beginning of a truncated prompt to keep; -1 keeps as much as possible.
    num_keep: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] = DEFAULT_KEEP
    # Accepted without effect: the operator chooses how the model is loaded.
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
        """The model with a context of ``num_ctx`` tokens and a default limit of ``num_predict``
        output tokens, or as many as fit."""
        limit = min(self.num_ctx or model.max_model_len, model.max_model_len)
        max_tokens = model.defaults.max_tokens or limit
        if self.num_predict > 0:
            max_tokens = self.num_predict
        defaults = replace(model.defaults, max_tokens=max_tokens)
        return replace(model, max_model_len=limit, defaults=defaults)


class OllamaBody(BodyModel):
    """The fields of all routes."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    options: Annotated[dict[str, Any], DocumentedAs(OllamaOptions)] = Field(default_factory=dict)
    keep_alive: Annotated[Any, DocumentedAs(str | float)] = None

    def read_options(self, model: ServedModel, ignored: set[str]) -> OllamaOptions:
        """The options, checked after the fields that all routes share. Raises ``RequestError``, or
        ``ApiError`` 404 for another model."""
        check_name(self.model, model)
        _check_keep_alive(self.keep_alive)
        return OllamaOptions.read(self.options, ignored, "options.", at="options")


class OllamaGenerationBody(OllamaBody):
    """The fields of both generation routes."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "shift": (False,),  # nodes end the output when the context is full
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
    """A request with the name by which the client requested the model. With ``returns_context``,
    the response ends with the tokens of prompt and output."""

    requested_model: str
    returns_context: bool = False
    include_reasoning: bool = True

    @classmethod
    def of(
        cls, parsed: GenerationRequest, body: OllamaBody, model: ServedModel, ignored: set[str],
        **changes: Any,
    ) -> OllamaRequest:  # fmt: skip
        """The request that a ``body`` was translated to."""
        names = {field.name for field in fields(cls)}
        common = {f.name: getattr(parsed, f.name) for f in fields(parsed) if f.name in names}
        own = {
            "request_id": f"ollama-{uuid.uuid4().hex}",
            "requested_model": body.model,
            "model": model,
            "ignored": ignored | parsed.ignored,
        }
        return cls(**{**common, **own, **changes})


class OnlyLoadsError(Exception):
    """A request without a prompt, by which clients load a model in advance; ``content`` is the
    empty part of its response."""

    def __init__(self, requested_model: str, content: dict[str, Any]) -> None:
        super().__init__("a request without a prompt")
        self.requested_model = requested_model
        self.content = content


def read_chat(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The chat completion of POST /api/chat. Raises ``RequestError`` or ``OnlyLoadsError``."""
    ignored: set[str] = set()
    request = OllamaChatRequest.read(body, ignored)
    sampling = request.read_options(model, ignored)
    messages = [_message(m, f"messages[{i}]", ignored) for i, m in enumerate(request.messages)]
    chat = _generation_body(request, sampling, model, options) | {
        "chat_template_kwargs": _variables(request, model, options),
        "tools": request.tools,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
    }
    if not messages:
        raise OnlyLoadsError(request.model, {"message": {"role": "assistant", "content": ""}})
    limited = sampling.limited(model)

    def parse(turns: Messages) -> GenerationRequest:
        return parse_chat(chat | {"messages": turns}, limited, options)

    with errors_of_ollama(limited):
        if request.truncate:
            parsed = parse_fitting(messages, parse, whole_turns=False)
        else:
            parsed = parse(messages)
    return _request(parsed, request, model, ignored)


def read_generate(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """The completion of POST /api/generate. Raises ``RequestError`` or ``OnlyLoadsError``."""
    ignored: set[str] = set()
    request = OllamaGenerateRequest.read(body, ignored)
    sampling = request.read_options(model, ignored)
    for i, token in enumerate(request.context):
        check_token(f"context[{i}]", token, model.vocab_size)
    templated = not (request.raw or request.suffix)
    completion = _generation_body(request, sampling, model, options) | {
        "logprobs": request.top_logprobs if request.logprobs else None,
        "return_token_ids": templated,
    }
    if not (request.prompt or request.suffix):
        raise OnlyLoadsError(request.model, {"response": ""})
    limited = sampling.limited(model)
    with errors_of_ollama(limited):
        prompt = _prompt(request, sampling.num_keep, model, limited, options)
        completion |= {"prompt": prompt, "suffix": request.suffix}
        parsed = parse_completion(completion, limited, options)
    if templated:
        parser = reasoning_of(model, options)
        opened = prompt_opens_reasoning(parser, parsed.prompts[0].tokens, model)
        text = replace(parsed.text, reasoning_parser=parser, reasoning_opened=opened)
        follow_reasoning(parsed.sampling, parser, opened)
        parsed = replace(parsed, text=text)
    return _request(parsed, request, model, ignored, returns_context=templated)


def check_name(name: str, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 for another model. Names in Ollama's API end with a tag."""
    model.check_name(name.removesuffix(LATEST))


@contextmanager
def errors_of_ollama(limited: ServedModel) -> Iterator[None]:
    """Translate errors in a translated body to the names of Ollama's fields."""
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
    request: OllamaGenerationBody,
    sampling: OllamaOptions,
    model: ServedModel,
    options: RouterOptions,
) -> dict[str, Any]:
    """The fields that chat completions and text completions share."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true", "top_logprobs")
    check_alternatives("top_logprobs", request.top_logprobs, options)
    body = {openai_name: getattr(sampling, name) for name, openai_name in OPENAI_NAMES.items()}
    body["stream"] = request.stream
    if request.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        body["json_schema"] = request.format
    elif request.format not in (None, ""):
        message = f'invalid format: {request.format!r:.64}; expected "json" or a JSON schema'
        raise invalid(message, "format")
    return body


def _request(
    parsed: GenerationRequest, request: OllamaGenerationBody, model: ServedModel, ignored: set[str],
    **changes: Any,
) -> OllamaRequest:  # fmt: skip
    constrained = parsed.sampling.structured_outputs
    if constrained.param in ("response_format", "json_schema"):
        constrained.param = "format"
    own = {"include_usage": True, "include_reasoning": request.think is not False}
    return OllamaRequest.of(parsed, request, model, ignored, **own, **changes)


def _prompt(
    request: OllamaGenerateRequest, keep: int, model: ServedModel, limited: ServedModel,
    options: RouterOptions,
) -> str | list[int]:  # fmt: skip
    """The prompt of the completion: tokens that fit, or the text before a gap. Raises
    ``RequestError``."""
    if request.raw or request.suffix:
        for name, value in (("system", request.system), ("context", request.context)):
            if value:
                mode = "raw mode" if request.raw else "a request with 'suffix'"
                raise invalid(f"{mode} does not support template, system, or context", name)
        if request.suffix:
            return request.prompt
        tokens = encode_text(request.prompt, model, param="prompt", truncated=request.truncate)
    else:
        turns = [{"role": "system", "content": request.system}] if request.system else []
        turns.append({"role": "user", "content": request.prompt})
        variables = _variables(request, model, options)
        tokens = encode_chat(turns, model, variables=variables, truncated=request.truncate)
    return _fitting(request.context + tokens, keep, limited, truncate=request.truncate)


def _fitting(tokens: list[int], keep: int, limited: ServedModel, *, truncate: bool) -> list[int]:
    """The prompt, without its middle if it is too long. Raises ``ContextError`` if it may not be
    truncated, or if no token fits."""
    room = limited.max_model_len - 1  # for the output
    if len(tokens) <= room:
        return tokens
    if not truncate or not room:
        raise ContextError("too long", param="prompt", length=len(tokens), requested=1)
    keep = min(limited.max_model_len if keep < 0 else keep, limited.max_model_len // 2)
    return tokens[:keep] + tokens[len(tokens) - (room - keep) :]


def _variables(
    request: OllamaGenerationBody, model: ServedModel, options: RouterOptions
) -> dict[str, Any]:
    """The template variables that turn reasoning on and off."""
    think = request.think
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in EFFORTS:
        message = f"Invalid value for 'think': must be true, false, or one of {EFFORTS}."
        raise invalid(message, "think")
    if think and reasoning_of(model, options) == NO_PARSER:
        raise invalid(f'"{request.model}" does not support thinking', "think")
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


def _check_keep_alive(keep_alive: Any) -> None:
    """Check ``keep_alive``. Any time is accepted, since the model stays loaded; unloading it is
    rejected. Raises ``RequestError``."""
    if keep_alive is None:
        return
    number = isinstance(keep_alive, (int, float)) and not isinstance(keep_alive, bool)
    if not number and not (isinstance(keep_alive, str) and _DURATION.fullmatch(keep_alive[:64])):
        raise invalid(
            f"invalid keep_alive: {keep_alive!r:.64}; expected seconds or a duration such as '5m'",
            "keep_alive",
        )
    digits = str(keep_alive) if number else re.sub(r"[^\d]", "", keep_alive)
    if float(digits) == 0:
        message = "'keep_alive': 0 is not supported: clients of this server cannot unload its model"
        raise invalid(message, "keep_alive", "unsupported_value")
