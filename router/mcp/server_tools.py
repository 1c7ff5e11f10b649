"""The tools of servers and the outcomes of calls: plain values, without the SDK."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A tool as its server describes it; ``schema`` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    schema: dict[str, Any] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool that the router runs: the label of its server, and the server's name for it."""

    label: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class McpListing:
    """The tools of one server, or the reason why they are unavailable."""

    label: str
    tools: tuple[McpTool, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The text of a tool call's result, or an error: of the tool if ``by_tool``, otherwise of the
    protocol or the transport."""

    text: str
    failed: bool = False
    by_tool: bool = False
    code: int = 0

    def error(self) -> dict[str, Any] | None:
        """The error in the shape of OpenAI's Responses API."""
        if not self.failed:
            return None
        if self.by_tool:
            content = [{"type": "text", "text": self.text}]
            return {"type": "mcp_tool_execution_error", "content": content}
        return {"type": "mcp_protocol_error", "code": self.code, "message": self.text}
