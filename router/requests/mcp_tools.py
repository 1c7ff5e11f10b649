"""Tools of MCP servers: their fields in requests, and their names for models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .body_model import BodyModel, DocumentedAs

# Tools in a filter; a server has at most 512 tools.
MAX_TOOL_NAMES = 1024
SEPARATOR = "__"
MAX_NAME = 64  # characters
_INVALID = re.compile(r"[^a-zA-Z0-9_-]")


class McpToolFilter(BodyModel):
    """Some tools of a server."""

    tool_names: Annotated[list[str], Field(max_length=MAX_TOOL_NAMES)] | None = None
    read_only: bool = False


class McpApprovalFilter(BodyModel):
    """The tools of a server whose calls need the client's approval: all in ``always``, and all that
    are not in ``never``."""

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


def model_name(server_label: str, tool: str) -> str:
    """The name of a tool for models: ``LABEL__TOOL``. A name with characters that some templates
    reject, or that is too long or ambiguous, is changed, and ends with a digest to be unique."""
    name = f"{server_label}{SEPARATOR}{tool}"
    clean = _INVALID.sub("_", name)
    if clean == name and len(name) <= MAX_NAME and SEPARATOR not in tool:
        return name
    digest = hashlib.sha256(f"{server_label}\0{tool}".encode()).hexdigest()[:8]
    return f"{clean[: MAX_NAME - 9]}_{digest}"
