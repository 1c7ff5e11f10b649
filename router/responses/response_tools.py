"""The tools of a response: OpenAI's shape of them, and that of chat completions."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.body_model import BodyModel
from ..requests.mcp_fields import ApprovalMode, McpApprovalFilter

FUNCTION, MCP = "function", "mcp"


class ResponseTool(BodyModel):
    """A function that the client runs, or an MCP server of the router's, which runs its tools."""

    type: Literal["function", "mcp"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_label: str | None = None
    server_description: str | None = None
    allowed_tools: list[str] | dict[str, Any] | None = None
    require_approval: ApprovalMode | McpApprovalFilter | None = None


class NamedResponseTool(BodyModel):
    """One function, or the tools of an MCP server."""

    type: Literal["function", "mcp"]
    name: str | None = None
    server_label: str | None = None


class AllowedResponseTools(BodyModel):
    """A part of the tools, of which the model may or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedResponseTool]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools


def chat_tools(tools: list[Any]) -> list[Any]:
    """The tools as chat completions have them. Raises ``RequestError``."""
    return [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _chat_tool(tool: Any, param: str) -> Any:
    if not isinstance(tool, dict):
        raise wrong_type(param, "an object", tool)
    kind = tool.get("type")
    if kind not in (FUNCTION, MCP):
        raise invalid(
            f"'{param}.type': tools of the type {kind!r:.64} are not supported by this server; it "
            f"has '{FUNCTION}' and '{MCP}'.",
            f"{param}.type",
            "unsupported_value",
        )
    if kind == MCP:
        return tool
    return {"type": FUNCTION, FUNCTION: _without(tool, "type")}


def chat_tool_choice(choice: Any) -> Any:
    """The ``tool_choice`` as chat completions have it."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == FUNCTION:
        return {"type": FUNCTION, FUNCTION: _without(choice, "type")}
    if kind == "allowed_tools":
        allowed = _without(choice, "type")
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [chat_tool_choice(tool) for tool in allowed["tools"]]
        return {"type": kind, kind: allowed}
    return choice


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the response repeats it."""
    if tool["type"] == MCP:
        return {"allowed_tools": None, "require_approval": "never", "headers": None} | tool
    return {"description": None, "parameters": None, "strict": None} | tool


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}
