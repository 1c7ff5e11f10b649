"""The tools of a request, converted to OpenAI's form, which chat templates expect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel, DocumentedAs

MAX_TOOLS = 1024
MAX_NAME = 256
# OpenAI's ``tool_choice`` by Anthropic's type, except for ``tool``.
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ToolDefinition(BodyModel):
    """A tool that the client runs; ``input_schema`` is the JSON schema of its input."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # Accepted without effect: the prompt always has the whole definition, and input is streamed.
    cache_control: Any = None
    input_examples: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    eager_input_streaming: Any = None


class ToolUseChoice(BodyModel):
    """The tools that the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=MAX_NAME)] = ""
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> Any:
        """OpenAI's ``tool_choice``."""
        if self.type != "tool":
            return CHOICES[self.type]
        return {"type": "function", "function": {"name": self.name}}


Definitions = Annotated[list[Any], Field(max_length=MAX_TOOLS), DocumentedAs(list[ToolDefinition])]
Choice = Annotated[dict[str, Any], DocumentedAs(ToolUseChoice)]


def read_definitions(tools: list[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """Check and convert tools. Raises ``RequestError``."""
    definitions = [_read(tool, f"tools.{i}", ignored) for i, tool in enumerate(tools)]
    names: set[str] = set()
    for i, tool in enumerate(definitions):
        name = tool["function"]["name"]
        if name in names:
            message = f"'tools.{i}.name': there are two tools named '{name}'."
            raise invalid(message, f"tools.{i}.name", "duplicate_tool")
        names.add(name)
    return definitions


def read_choice(tool_choice: dict[str, Any], tools: list[dict[str, Any]], ignored: set[str]) -> Any:
    """Check ``tool_choice``. Raises ``RequestError``."""
    if not tool_choice:
        return ToolUseChoice(type="auto")
    choice = ToolUseChoice.read(tool_choice, ignored, "tool_choice.", at="tool_choice")
    if choice.type in ("any", "tool") and not tools:
        raise invalid("'tool_choice' needs 'tools'.", "tool_choice", "invalid_value")
    if choice.type == "tool" and all(t["function"]["name"] != choice.name for t in tools):
        message = f"'tool_choice' names the tool '{choice.name}', which is not in 'tools'."
        raise invalid(message, "tool_choice.name", "invalid_value")
    return choice


def _read(tool: Any, param: str, ignored: set[str]) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise invalid(
            f"'{param}': tools of the type {str(kind)[:64]!r} are not supported by this server; it "
            f"takes tools with an 'input_schema'.",
            f"{param}.type",
            "unsupported_value",
        )
    definition = ToolDefinition.read(tool, ignored, "tools[].", at=param)
    function: dict[str, Any] = {"name": definition.name, "parameters": definition.input_schema}
    if definition.strict:
        function["strict"] = True
    if definition.description is not None:
        function["description"] = definition.description
    return {"type": "function", "function": function}
