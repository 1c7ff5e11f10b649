"""Anthropic's messages, converted to the turns that chat templates expect."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.call_arguments import HistoryArguments
from .content_blocks import (
    ASSISTANT_BLOCKS,
    TEXT_BLOCKS,
    USER_BLOCKS,
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    read_blocks,
)

ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 16_384
# Claude Code's first system block has a hash that differs in each request, so no prefix would ever
# be reused.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")

Turn = dict[str, Any]
TextOrBlocks = Annotated[Any, DocumentedAs(str | list[TextBlock])]
AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(BodyModel):
    """One message of a conversation. System messages may stand between others."""

    role: Annotated[str, Field(max_length=64), DocumentedAs(Literal[ROLES])]
    content: Annotated[Any, DocumentedAs(str | list[AnyBlock])]


Messages = Annotated[
    list[Any],
    Field(max_length=MAX_MESSAGES),
    DocumentedAs(Annotated[list[InputMessage], Field(min_length=1)]),
]


def read_conversation(system: Any, messages: list[Any], ignored: set[str]) -> list[Turn]:
    """The turns of a request. Adjacent messages of a role become one turn, as in Anthropic's API,
    and so do all system messages at the beginning. Raises ``RequestError``."""
    if not messages:
        raise invalid("'messages' must have at least one message.", "messages")
    reader = _TurnReader(ignored)
    if system is not None:
        reader.add_system(system, "system")
    for i, item in enumerate(messages):
        reader.add(item, f"messages.{i}")
    if not reader.turns:
        raise invalid("'messages' must have a message that is not empty.", "messages")
    reader.arguments.note()
    return reader.turns


class _TurnReader:
    """Reads messages into ``turns``; ``arguments`` collects those of their tool calls."""

    def __init__(self, ignored: set[str]) -> None:
        self.turns: list[Turn] = []
        self.arguments = HistoryArguments()
        self._ignored = ignored
        self._tools: dict[str, str] = {}  # the tool's name by the id of its call

    def add(self, item: Any, param: str) -> None:
        if not isinstance(item, dict):
            raise wrong_type(param, "an object", item)
        message = InputMessage.read(item, self._ignored, "messages[].", at=param)
        if message.role == "system":
            self.add_system(message.content, f"{param}.content")
        elif message.role == "assistant":
            self._add_assistant(self._blocks(message, ASSISTANT_BLOCKS, param), param)
        elif message.role == "user":
            self._add_user(self._blocks(message, USER_BLOCKS, param), param)
        else:
            raise invalid(
                f"Invalid value for '{param}.role': '{message.role}'; supported values are: "
                f"{', '.join(ROLES)}.",
                f"{param}.role",
                "invalid_value",
            )

    def add_system(self, content: Any, param: str) -> None:
        blocks = read_blocks(content, TEXT_BLOCKS, param, self._ignored)
        text = "\n".join(filter(None, (_without_billing(block) for block in blocks)))
        if text:
            _append(self.turns, {"role": "system", "content": text}, roles=("system",))

    def _blocks(self, message: InputMessage, kinds: Any, param: str) -> list[Block]:
        return read_blocks(message.content, kinds, f"{param}.content", self._ignored)

    def _add_user(self, blocks: list[Block], param: str) -> None:
        if not blocks:
            message = f"'{param}.content' must have at least one content block."
            raise invalid(message, f"{param}.content")
        for i, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                turn = self._tool_result(block, f"{param}.content.{i}")
                self.turns.append(turn)
            elif isinstance(block, TextBlock):
                _append(self.turns, {"role": "user", "content": block.text})

    def _tool_result(self, block: ToolResultBlock, param: str) -> Turn:
        text = _text(read_blocks(block.content, TEXT_BLOCKS, f"{param}.content", self._ignored))
        if block.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        turn = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        # Some templates write the tool's name.
        name = self._tools.get(block.tool_use_id)
        return turn if name is None else turn | {"name": name}

    def _add_assistant(self, blocks: list[Block], param: str) -> None:
        turn: Turn = {"role": "assistant", "content": _text(blocks)}
        thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        if any(thinking):
            turn["reasoning_content"] = "\n".join(thinking)
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        if calls:
            self._tools |= {call.id: call.name for call in calls}
            turn["tool_calls"] = [self._tool_call(call) for call in calls]
        _append(self.turns, turn, roles=("assistant",))

    def _tool_call(self, call: ToolUseBlock) -> dict[str, Any]:
        function = {"name": call.name, "arguments": self.arguments.read(call.input)}
        return {"id": call.id, "type": "function", "function": function}


def _append(turns: list[Turn], turn: Turn, roles: tuple[str, ...] = ("user",)) -> None:
    """Add a turn. It is merged into the last one if both have the same role, and it is one of
    ``roles``."""
    last: Turn = turns[-1] if turns else {"role": None}
    if last["role"] != turn["role"] or turn["role"] not in roles:
        turns.append(turn)
        return
    for name in turn.keys() - {"role"}:
        value, addition = last.get(name), turn[name]
        if isinstance(addition, str):
            last[name] = f"{value}\n{addition}" if value and addition else value or addition
        else:
            last[name] = [*(value or ()), *addition]


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _without_billing(block: Block) -> str:
    return BILLING.sub("", block.text, count=1) if isinstance(block, TextBlock) else ""
