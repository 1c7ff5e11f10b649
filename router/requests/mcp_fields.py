"""The tools of MCP servers in a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .body_model import BodyModel, DocumentedAs

# In a filter; a server has at most 512 tools.
MAX_NAMES = 1024


class McpToolFilter(BodyModel):
    """Some tools of a server."""

    tool_names: Annotated[list[str], Field(max_length=MAX_NAMES)] | None = None
    read_only: bool = False


class McpApprovalFilter(BodyModel):
    """The tools of a server whose calls wait for the client: those of ``always``, and all that are
    not in ``never``."""

    always: Annotated[Any, DocumentedAs(McpToolFilter)] = None
    never: Annotated[Any, DocumentedAs(McpToolFilter)] = None


ApprovalMode = Literal["always", "never"]


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
    require_approval: Annotated[Any, DocumentedAs(Literal["never"])] = None


class McpToolChoice(BodyModel):
    """A tool of one server, or any of them."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None
