"""POST /api/chat and /api/generate: from bodies to a ``GenerationRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, TextOptions, new_tokens
from ..openai.chat_messages import read_messages
from ..openai.tools import Tools, read_tools
from ..options import RouterOptions
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.context import check_context, encode_chat, encode_text
from ..requests.response_size import ResponseSize
from ..served_model import ServedModel
from .ollama_options import OllamaOptions

LATEST = ":latest"
MAX_MESSAGES = 16_384
EFFORTS = ("low", "medium", "high")


class OllamaBody(BodyModel):
    """The fields of both routes."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "format": ("",),
        "images": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
    }

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    stream: bool = True
    options: Annotated[dict[str, Any], DocumentedAs(OllamaOptions)] = Field(default_factory=dict)
    think: Annotated[Any, DocumentedAs(bool | Literal[EFFORTS])] = None
    # Accepted without effect: the model is always loaded, and prompts are never cut.
    keep_alive: Any = None
    truncate: Any = None
    shift: Any = None


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
    ]
    tools: Tools = Field(default_factory=list)


class OllamaGenerateRequest(OllamaBody):
    """The body of POST /api/generate."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaBody.unsupported,
        "context": ([],),
        "suffix": ("",),
        "template": ("",),
    }

    prompt: Annotated[str, Field(min_length=1)]
    system: str = ""
    raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(GenerationRequest):
    """A request with the name by which the client called the model."""

    asked_model: str


def parse_chat(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """Check a body, render the chat template, tokenize. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = OllamaChatRequest.read(body, ignored)
    check_name(asked.model, model)
    messages = [_message(m, f"messages[{i}]", ignored) for i, m in enumerate(asked.messages)]
    tools = read_tools(asked.tools, None, True, model, options, ignored)
    tokens = encode_chat(
        read_messages(messages, model, ignored),
        model,
        variables=_variables(asked, options),
        tools=tools.shown,
    )
    text = {"reasoning_parser": options.reasoning_parser, "tools": tools.use}
    return _request(asked, tokens, text, model, options, ignored)


def parse_generate(body: Any, model: ServedModel, options: RouterOptions) -> OllamaRequest:
    """Check a body, render the chat template unless it is raw, tokenize."""
    ignored: set[str] = set()
    asked = OllamaGenerateRequest.read(body, ignored)
    check_name(asked.model, model)
    if asked.raw:
        if asked.system:
            raise invalid("raw mode does not support template, system, or context", "raw")
        tokens = encode_text(asked.prompt, model, param="prompt")
        return _request(asked, tokens, {}, model, options, ignored)
    turns = [{"role": "system", "content": asked.system}] if asked.system else []
    turns.append({"role": "user", "content": asked.prompt})
    tokens = encode_chat(turns, model, variables=_variables(asked, options))
    text = {"reasoning_parser": options.reasoning_parser}
    return _request(asked, tokens, text, model, options, ignored)


def check_name(name: str, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 for another model. Ollama's names end with a tag."""
    model.check_name(name.removesuffix(LATEST))


def _request(
    asked: OllamaBody, tokens: list[int], text: dict[str, Any], model: ServedModel,
    options: RouterOptions, ignored: set[str],
) -> OllamaRequest:  # fmt: skip
    sampling = OllamaOptions.read(asked.options, ignored, "options.", at="options")
    wanted = sampling.max_tokens
    granted = check_context(
        [len(tokens)], wanted, model, param="messages", default=model.max_model_len
    )
    size = ResponseSize(
        prompts=[len(tokens)], n=1, logprobs=None, prompt_alternatives=None, echoed=0,
        token_ids=False, stream=asked.stream,
    )  # fmt: skip
    if wanted is None:
        granted = size.fit(granted, options)
    size.check(granted, options)
    return OllamaRequest(
        request_id=f"ollama-{uuid.uuid4().hex}",
        asked_model=asked.model,
        model=model,
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=granted,
        sampling=sampling.sampling(model),
        text=TextOptions(stop=StopStrings(sampling.stop), **text),
        stream=asked.stream,
        include_usage=True,
        include_reasoning=asked.think is not False,
        ignored=ignored,
    )


def _variables(asked: OllamaBody, options: RouterOptions) -> dict[str, Any]:
    """The variables by which templates turn reasoning on and off."""
    think = asked.think
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in EFFORTS:
        message = f"Invalid value for 'think': must be true, false, or one of {EFFORTS}."
        raise invalid(message, "think")
    if think and options.reasoning_parser == NO_PARSER:
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
