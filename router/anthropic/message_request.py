"""POST /v1/messages: from the body to a ``GenerationRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ...shared.text.chat_template import flatten_content
from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, TextOptions, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import wrong_type
from ..requests.body_model import BOUNDED, WHOLE, BodyModel, DocumentedAs
from ..requests.context import check_context, encode_chat
from ..requests.response_size import ResponseSize
from ..served_model import ServedModel

ROLES = ("user", "assistant")
MAX_MESSAGES = 16_384
INT32 = 2**31


class TextBlock(BodyModel):
    """A block of text. Blocks of other types are rejected."""

    type: Literal["text"]
    text: str
    # Accepted without effect: prefixes are always cached.
    cache_control: Any = None
    citations: Any = None


TextOrBlocks = Annotated[Any, DocumentedAs(str | list[TextBlock])]
StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class InputMessage(BodyModel):
    """One turn of a conversation."""

    role: Annotated[str, Field(max_length=64), DocumentedAs(Literal[ROLES])]
    content: TextOrBlocks


class MessagesRequest(BodyModel):
    """The body of POST /v1/messages."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": ({"type": "text"},),
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "none"}, {"type": "auto"}),
        "tools": ([],),
    }

    model: Annotated[str, Field(max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE]
    messages: Annotated[
        list[Any],
        Field(max_length=MAX_MESSAGES),
        DocumentedAs(Annotated[list[InputMessage], Field(min_length=1)]),
    ]
    system: TextOrBlocks = None
    stream: bool = False
    stop_sequences: Annotated[list[StopSequence], Field(max_length=64)] = Field(
        default_factory=list
    )
    temperature: Annotated[float, Field(ge=0, le=1), BOUNDED] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), BOUNDED] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] | None = None
    # Accepted without effect: Anthropic uses them for its own accounting.
    metadata: Any = None
    service_tier: Any = None


def parse_messages(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body, render the chat template, tokenize. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = MessagesRequest.read(body, ignored)
    model.check_name(asked.model)
    tokens = encode_chat(_conversation(asked, ignored), model)
    granted = check_context([len(tokens)], asked.max_tokens, model, param="messages", default=1)
    size = ResponseSize(
        prompts=[len(tokens)],
        n=1,
        logprobs=None,
        prompt_alternatives=None,
        echoed=0,
        token_ids=False,
        stream=asked.stream,
        copies=1 if options.reasoning_parser == NO_PARSER else 2,
    )
    size.check(granted, options)
    return GenerationRequest(
        request_id=f"msg_{uuid.uuid4().hex}",
        model=model,
        prompts=[EncodedPrompt(new_tokens(tokens))],
        max_tokens=granted,
        sampling=_sampling(asked, model),
        text=TextOptions(
            stop=StopStrings(asked.stop_sequences), reasoning_parser=options.reasoning_parser
        ),
        stream=asked.stream,
        include_usage=True,
        include_reasoning=False,
        ignored=ignored,
    )


def _sampling(asked: MessagesRequest, model: ServedModel) -> pb.Sampling:
    return pb.Sampling(
        temperature=model.default("temperature", asked.temperature, 1.0),
        top_p=model.default("top_p", asked.top_p, 1.0),
        top_k=max(0, int(model.default("top_k", asked.top_k, 0))),
        min_p=model.default("min_p", None, 0.0),
        repetition_penalty=model.default("repetition_penalty", None, 1.0),
        n=1,
    )


def _conversation(asked: MessagesRequest, ignored: set[str]) -> list[dict[str, Any]]:
    """The system prompt and the messages, in the form that templates expect."""
    if not asked.messages:
        raise invalid("'messages' must have at least one message.", "messages")
    turns = [_turn(item, f"messages.{i}", ignored) for i, item in enumerate(asked.messages)]
    if turns[-1]["role"] != "user":
        raise invalid(
            "The last of 'messages' must have the role 'user': this server does not continue a "
            "message of the assistant.",
            "messages",
        )
    if asked.system is None:
        return turns
    return [{"role": "system", "content": flatten_content(asked.system, param="system")}, *turns]


def _turn(item: Any, param: str, ignored: set[str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    message = InputMessage.read(item, ignored, "messages[].")
    if message.role not in ROLES:
        raise invalid(
            f"Invalid value for '{param}.role': '{message.role}'; supported values are: "
            f"{', '.join(ROLES)}. The system prompt is the parameter 'system'.",
            f"{param}.role",
        )
    content = flatten_content(message.content, param=f"{param}.content")
    return {"role": message.role, "content": content}
