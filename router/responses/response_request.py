"""POST /v1/responses: from the body to the request of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import WHOLE, BodyModel, DocumentedAs

INT32 = 2**31
MAX_METADATA = 16
# Fields that chat completions check, under the same names.
SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
TEXT_PARTS = ("input_text", "output_text", "text")


class CreateResponseRequest(BodyModel):
    """The body of POST /v1/responses. Sampling parameters are those of chat completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "prompt": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: Any = None
    input: Annotated[Any, DocumentedAs(str | list[dict[str, Any]])]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] = Field(
        default_factory=dict
    )
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    reasoning: dict[str, Any] = Field(default_factory=dict)
    store: bool = True
    stream: Any = None
    text: dict[str, Any] = Field(default_factory=dict)
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    stop: Any = None
    ignore_eos: Any = None
    priority: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    # No effect without tools, or for OpenAI's accounting.
    parallel_tool_calls: Any = None
    stream_options: Any = None
    service_tier: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


@dataclass(frozen=True, slots=True)
class InputItems:
    """The input: as items with ids, as clients see it, and as messages of a chat."""

    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def read_input(given: Any) -> InputItems:
    """Raises ``RequestError`` for items other than messages with text."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise wrong_type("input", "a string or an array", given)
    if not given:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    read = [_item(item, f"input[{i}]") for i, item in enumerate(given)]
    found = [pair for pair in read if pair is not None]
    return InputItems([item for item, _ in found], [message for _, message in found])


def _item(item: Any, param: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None  # of earlier answers, which templates leave out
    if kind != "message":
        message = f"Invalid '{param}': items of the type '{str(kind)[:64]}' are not supported."
        raise invalid(message, "input", "unsupported_value")
    role, text = item.get("role"), _text(item.get("content"), param)
    if role not in ("user", "assistant", "system", "developer"):
        message = f"Invalid '{param}.role': 'user', 'assistant', 'system' or 'developer'."
        raise invalid(message, "input", "invalid_value")
    part = {"type": "output_text", "text": text, "annotations": []}
    content = part if role == "assistant" else {"type": "input_text", "text": text}
    shown = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "completed"}
    return shown | {"role": role, "content": [content]}, {"role": role, "content": text}


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(f"{param}.content", "a string or an array", content)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            message = f"Invalid '{param}.content': this model takes parts with text only."
            raise invalid(message, "input", "unsupported_value")
        texts.append(part["text"])
    return "".join(texts)


def chat_body(asked: CreateResponseRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of the chat completion that computes a response."""
    body = {name: getattr(asked, name) for name in SAME}
    body["messages"] = messages
    body["max_completion_tokens"] = asked.max_output_tokens
    body["reasoning_effort"] = asked.reasoning.get("effort")
    layout = asked.text.get("format")
    if isinstance(layout, dict) and layout.get("type") == "json_schema":
        schema = {name: value for name, value in layout.items() if name != "type"}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif layout is not None:
        body["response_format"] = layout
    return body
