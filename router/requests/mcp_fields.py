"""The tools of MCP servers in a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .body_model import BodyModel, DocumentedAs


class McpToolFilter(BodyModel):
    """Some tools of a server."""

    tool_names: list[str] | None = None
    read_only: bool = False


class McpToolRequest(BodyModel):
    """The tools of one of the router's MCP servers, which the router runs."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
    }

    type: Literal["mcp"]
    server_label: Annotated[str, Field(min_length=1, max_length=64)]
    server_description: Any = None
    allowed_tools: Annotated[Any, DocumentedAs(list[str] | McpToolFilter)] = None
    require_approval: Literal["never"] | None = None


class McpToolChoice(BodyModel):
    """A tool of one server, or any of them."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None
