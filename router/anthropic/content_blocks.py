"""Content blocks of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel, DocumentedAs

MAX_BLOCKS = 16_384
MAX_NAME = 256


class Block(BodyModel):
    """A block of any type. ``cache_control`` has no effect: prefixes are always cached."""

    cache_control: Any = None


class TextBlock(Block):
    """A block of text. Citations, which come in responses, are not part of the prompt."""

    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(Block):
    """Reasoning of an earlier turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another server, left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Block):
    """A tool call of an earlier turn. An ``input`` that is not an object counts as an empty one."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: Annotated[Any, DocumentedAs(dict[str, Any])] = None
    caller: Any = None


class ToolResultBlock(Block):
    """The result of a tool call. ``is_error`` is written into the text for the model."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    content: Annotated[Any, DocumentedAs(str | list[TextBlock])] = ""
    is_error: bool = False


USER_BLOCKS: Mapping[str, type[Block]] = {"text": TextBlock, "tool_result": ToolResultBlock}
ASSISTANT_BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}
TEXT_BLOCKS: Mapping[str, type[Block]] = {"text": TextBlock}


def read_blocks(
    content: Any, kinds: Mapping[str, type[Block]], param: str, ignored: set[str]
) -> list[Block]:
    """Check content: a string, or an array of blocks of these kinds. Raises ``RequestError``."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    if not isinstance(content, list):
        raise wrong_type(param, "a string or an array of content blocks", content)
    if len(content) > MAX_BLOCKS:
        message = f"'{param}' has {len(content)} content blocks; the limit is {MAX_BLOCKS}."
        raise invalid(message, param)
    return [_read(item, kinds, f"{param}.{i}", ignored) for i, item in enumerate(content)]


def _read(item: Any, kinds: Mapping[str, type[Block]], param: str, ignored: set[str]) -> Block:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    kind = item.get("type")
    if not isinstance(kind, str):
        raise wrong_type(f"{param}.type", "a string", kind)
    if kind not in kinds:
        raise invalid(
            f"'{param}' has the unsupported type '{kind[:64]}'; this model takes content blocks "
            f"of the type {_join(kinds)} here.",
            f"{param}.type",
            "unsupported_content",
        )
    return kinds[kind].read(item, ignored, "content[].", at=param)


def _join(kinds: Mapping[str, Any]) -> str:
    *names, last = (f"'{kind}'" for kind in kinds)
    return f"{', '.join(names)} or {last}" if names else last
