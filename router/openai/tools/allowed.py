"""``tool_choice`` of the type ``allowed_tools``: a subset of the tools, of which the model may or
must call one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from ...errors import invalid
from ...requests.body_errors import wrong_type
from ...requests.body_model import BodyModel

KIND = "allowed_tools"
_PARAM = "tool_choice.allowed_tools"


class AllowedTools(BodyModel):
    """``tools`` are of the form ``{"type": "function", "function": {"name": ...}}``."""

    mode: Literal["auto", "required"]
    tools: list[Any]


class AllowedToolsChoice(BodyModel):
    """Restricts the model to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Allowed(NamedTuple):
    """The names of the allowed tools, and the ``tool_choice`` among them."""

    names: list[str]
    mode: str


def allowed_tools(choice: Any, functions: Collection[str], ignored: set[str]) -> Allowed | None:
    """The subset of ``functions`` that ``choice`` allows; ``None`` if it allows all. Raises
    ``RequestError``."""
    if not isinstance(choice, dict) or choice.get("type") != KIND:
        return None
    subset = AllowedTools.read(choice.get(KIND), ignored, f"{_PARAM}.", at=_PARAM)
    names = [_name(tool, f"{_PARAM}.tools[{i}]", functions) for i, tool in enumerate(subset.tools)]
    if not names:
        raise invalid(f"Invalid '{_PARAM}.tools': empty array.", f"{_PARAM}.tools", "empty_array")
    return Allowed(names, subset.mode)


def _name(tool: Any, param: str, functions: Collection[str]) -> str:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool.get("type") != "function":
        message = f"'{param}' must be {{'type': 'function', 'function': {{'name': ...}}}}."
        raise invalid(message, param, "invalid_value")
    if name not in functions:
        message = f"'{param}' names the function '{name[:64]}', which is not in 'tools'."
        raise invalid(message, param, "invalid_value")
    return name
