"""The messages of a chat request: checked, and converted to the form that templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...shared.text.chat_template import flatten_content
from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel, DocumentedAs
from ..requests.call_arguments import HistoryArguments
from ..requests.ran_calls import RanCall, ran_turn

MAX_MESSAGES = 16_384
MAX_TOOL_CALLS = 1024
MAX_NAME = 1 << 20


class TextPart(BodyModel):
    """A text part of a message's content; other kinds are rejected."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BodyModel):
    """A refusal in an earlier reply."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(BodyModel):
    """The function of a tool call; ``arguments`` is a JSON object or its text, and any other value
    counts as an empty object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BodyModel):
    """An earlier tool call of the assistant."""

    id: str | None = None
    type: Any = None
    function: CalledFunction


class ChatMessage(BodyModel):
    """One message of a chat. ``reasoning`` is vLLM's newer name of ``reasoning_content``, and
    ``function_call`` the former way to write a single tool call. Clients send ``mcp_calls``,
    ``refusal`` and ``annotations`` when a response goes back as history."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"audio": ()}

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[Any, DocumentedAs(str | list[str | TextPart | RefusalPart])] = None
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    reasoning_content: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    reasoning: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[
        list[Any], Field(max_length=MAX_TOOL_CALLS), DocumentedAs(list[ToolCall])
    ] = Field(default_factory=list)
    function_call: Annotated[Any, DocumentedAs(CalledFunction)] = None
    mcp_calls: Annotated[
        list[Any], Field(max_length=MAX_TOOL_CALLS), DocumentedAs(list[RanCall])
    ] = Field(default_factory=list)
    refusal: Any = None
    annotations: Any = None


Messages = Annotated[
    list[Any],
    Field(max_length=MAX_MESSAGES),
    DocumentedAs(Annotated[list[ChatMessage], Field(min_length=1)]),
]


def read_messages(messages: list[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """Check messages and convert them to the form that templates expect."""
    if not messages:
        raise invalid(
            "Invalid 'messages': empty array; expected at least one message.",
            "messages",
            "empty_array",
        )
    arguments = HistoryArguments()
    converted: list[dict[str, Any]] = []
    for i, item in enumerate(messages):
        reader = _MessageReader(item, f"messages[{i}]", arguments, ignored)
        converted += reader.executed_calls()
        converted.append(reader.read())
    arguments.note()
    return converted


class _MessageReader:
    """Reads one message; ``param`` is its name in errors."""

    def __init__(
        self, item: Any, param: str, arguments: HistoryArguments, ignored: set[str]
    ) -> None:
        if not isinstance(item, dict):
            raise wrong_type(param, "an object", item)
        self._param = param
        self._arguments = arguments
        if item.get("role") is None:
            name = f"{param}.role"
            message = f"Missing required parameter: '{name}'."
            raise invalid(message, name, "missing_required_parameter")
        self._message = ChatMessage.read(item, ignored, "messages[].")
        self._ignored = ignored

    def executed_calls(self) -> list[dict[str, Any]]:
        """The turn before this message with the tool calls that the router has run."""
        calls = self._message.mcp_calls
        if not calls:
            return []
        return ran_turn(calls, f"{self._param}.mcp_calls", self._arguments, self._ignored)

    def read(self) -> dict[str, Any]:
        message = self._message
        converted: dict[str, Any] = {"role": message.role, "content": self._content()}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                converted[name] = value
        # Templates read the older name.
        if message.reasoning is not None:
            converted.setdefault("reasoning_content", message.reasoning)
        calls = message.tool_calls
        if message.function_call is not None:
            calls = [*calls, {"function": message.function_call}]
        if calls:
            converted["tool_calls"] = self._tool_calls(calls, message.role)
        return converted

    def _content(self) -> str:
        """The text, empty if there is none: as in vLLM, a message may consist of tool calls
        only."""
        content = self._message.content
        if content is None:
            return ""
        return flatten_content(content, param=f"{self._param}.content")

    def _tool_calls(self, calls: list[Any], role: str) -> list[dict[str, Any]]:
        """The assistant's earlier tool calls."""
        if role != "assistant":
            param = f"{self._param}.tool_calls"
            message = f"'{param}': only messages of the role 'assistant' have tool calls."
            raise invalid(message, param, "unsupported_value")
        return [
            self._tool_call(call, f"{self._param}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]

    def _tool_call(self, call: Any, param: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"'{param}.function.name' must be a string.", param, "invalid_type")
        arguments = self._arguments.read(function.get("arguments"))
        call_id = call.get("id") if isinstance(call.get("id"), str) else None
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
