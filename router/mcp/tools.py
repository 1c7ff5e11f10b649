"""Tools of the type ``mcp`` in a request, replaced by functions that the model may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import invalid
from ..requests.body_errors import wrong_type
from ..requests.mcp_tools import McpApprovalFilter, McpToolFilter, McpToolRequest, model_name
from .server_tools import McpListing, McpTool, ServerTool

KIND = "mcp"
# Fields by which a request would choose a server; the router would connect to it from inside the
# operator's network.
CHOOSES_SERVER = ("server_url", "connector_id", "tunnel_id", "headers", "authorization")


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The body of a chat with functions in place of server tools. ``tools`` has them by the names
    that the model uses; ``guarded`` has the names whose calls need an approval. ``errors`` has each
    server by label, with the reason if its tools are unavailable."""

    body: dict[str, Any]
    tools: dict[str, ServerTool] = field(default_factory=dict)
    guarded: set[str] = field(default_factory=set)
    listings: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, str | None] = field(default_factory=dict)


def offer_tools(
    body: dict[str, Any],
    servers: Mapping[str, McpListing],
    ignored: set[str],
    *,
    approvals: bool = False,
) -> ToolOffer:
    """Replace the server tools in the body of a chat. ``approvals`` says whether it may require
    them. Raises ``RequestError``."""
    offer = ToolOffer(dict(body))
    tools: list[Any] = []
    labels: dict[str, list[str]] = {}  # names of functions by server label
    for i, tool in enumerate(body["tools"]):
        if not is_mcp(tool):
            tools.append(tool)
            continue
        param = f"tools[{i}]"
        request, listing = _server_request(tool, param, servers, ignored)
        label = listing.label
        if label in labels:
            message = f"'{param}.server_label': the server '{label}' is listed twice."
            raise invalid(message, f"{param}.server_label", "duplicate_tool")
        allowed = _allowed(listing, request.allowed_tools, param, ignored)
        tools += [as_function(label, item) for item in allowed]
        names = {model_name(label, item.name): item for item in allowed}
        labels[label] = list(names)
        offer.tools.update((name, ServerTool(label, item.name)) for name, item in names.items())
        guarded = _guard(request.require_approval, f"{param}.require_approval", approvals, ignored)
        offer.guarded.update(name for name, item in names.items() if guarded(item))
        offer.listings.append(_listing_item(listing, allowed))
        offer.errors[label] = listing.error
    offer.body["tools"] = tools
    offer.body["tool_choice"] = _choice(body.get("tool_choice"), labels)
    return offer


def is_mcp(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == KIND


def as_function(label: str, tool: McpTool) -> dict[str, Any]:
    """A tool of a server as a function."""
    function = {"name": model_name(label, tool.name), "parameters": tool.schema}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _server_request(
    tool: dict[str, Any], param: str, servers: Mapping[str, McpListing], ignored: set[str]
) -> tuple[McpToolRequest, McpListing]:
    for name in CHOOSES_SERVER:
        if tool.get(name) is not None:
            raise invalid(
                f"'{param}.{name}' is not supported: requests use the MCP servers of the router's "
                f"configuration, by 'server_label'.",
                f"{param}.{name}",
                "unsupported_parameter",
            )
    request = McpToolRequest.read(tool, ignored, "tools[].", at=param)
    listing = servers.get(request.server_label)
    if listing is None:
        labels = ", ".join(f"'{label}'" for label in servers) or "none"
        message = (
            f"'{param}.server_label': this router has no MCP server '{request.server_label}'; it "
            f"has {labels}."
        )
        raise invalid(message, f"{param}.server_label", "invalid_value")
    return request, listing


def _allowed(listing: McpListing, allowed: Any, param: str, ignored: set[str]) -> list[McpTool]:
    if allowed is None:
        return list(listing.tools)
    if isinstance(allowed, list):
        allowed = {"tool_names": allowed}
    if not isinstance(allowed, dict):
        raise wrong_type(f"{param}.allowed_tools", "an array or an object", allowed)
    tool_filter = McpToolFilter.read(allowed, ignored, "", at=f"{param}.allowed_tools")
    return [tool for tool in listing.tools if _matches(tool_filter, tool)]


def _matches(tool_filter: McpToolFilter, tool: McpTool) -> bool:
    has_name = tool_filter.tool_names is None or tool.name in tool_filter.tool_names
    return has_name and (tool.read_only or not tool_filter.read_only)


def _guard(
    requirement: Any, param: str, approvals: bool, ignored: set[str]
) -> Callable[[McpTool], bool]:
    """A predicate for the tools whose calls need an approval."""
    if requirement in (None, "never"):
        return lambda tool: False
    if not approvals:
        message = f"'{param}' must be 'never' here: only /v1/responses asks for approvals."
        raise invalid(message, param, "unsupported_value")
    if requirement == "always":
        return lambda tool: True
    if not isinstance(requirement, dict):
        raise invalid(
            f"Invalid '{param}': it must be 'always', 'never' or an object with filters of tools.",
            param,
            "invalid_value",
        )
    filters = McpApprovalFilter.read(requirement, ignored, "", at=param)
    always = _filter(filters.always, f"{param}.always", ignored)
    never = _filter(filters.never, f"{param}.never", ignored)
    return lambda tool: always(tool) or not never(tool)


def _filter(tool_filter: Any, param: str, ignored: set[str]) -> Callable[[McpTool], bool]:
    if tool_filter is None:
        return lambda tool: False
    return partial(_matches, McpToolFilter.read(tool_filter, ignored, "", at=param))


def _listing_item(listing: McpListing, allowed: list[McpTool]) -> dict[str, Any]:
    """The ``mcp_list_tools`` item of a response, without its id."""
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.schema,
            "annotations": {"read_only": tool.read_only},
        }
        for tool in allowed
    ]
    return {
        "type": "mcp_list_tools",
        "server_label": listing.label,
        "tools": tools,
        "error": listing.error,
    }


def _choice(choice: Any, labels: Mapping[str, list[str]]) -> Any:
    """The ``tool_choice`` in terms of functions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == KIND:
        names = _names(choice, labels)
        if not names:
            return "auto"  # without an available server, only its tools are missing
        return _among(names, "required")
    allowed = choice.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        tools: list[Any] = []
        for tool in allowed["tools"]:
            tools += _functions(_names(tool, labels)) if is_mcp(tool) else [tool]
        return choice | {"allowed_tools": allowed | {"tools": tools}}
    return choice


def _names(choice: dict[str, Any], labels: Mapping[str, list[str]]) -> list[str]:
    label, name = choice.get("server_label"), choice.get("name")
    if not isinstance(label, str) or label not in labels:
        message = "'tool_choice' names an MCP server that is not in 'tools'."
        raise invalid(message, "tool_choice", "invalid_value")
    names = labels[label]
    return [own for own in names if name is None or own == model_name(label, str(name))]


def _among(names: list[str], mode: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": _functions(names)},
    }


def _functions(names: list[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]
