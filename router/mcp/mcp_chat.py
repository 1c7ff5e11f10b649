"""Chat completions with the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import invalid
from ..generation import GenerationRequest
from ..openai.chat_request import parse_chat
from ..openai.surfaces import ChatCompletions
from ..options import RouterOptions
from ..served_model import ServedModel
from .mcp_servers import McpServers
from .mcp_tools import as_function, is_mcp, offer_tools
from .rounds import Rounds

_TOOL_FIELDS = ("tools", "functions", "tool_choice", "function_call")


class McpChat:
    """Parses chats whose tools may be those of the router's servers, if it has any."""

    def __init__(self, servers: McpServers | None) -> None:
        self._servers = servers

    def parse(
        self,
        body: Any,
        model: ServedModel,
        options: RouterOptions,
        *,
        most_calls: int | None = None,
    ) -> GenerationRequest:
        """Check a body, and tokenize it. Raises ``RequestError``."""
        tools = body.get("tools") if isinstance(body, dict) else None
        if isinstance(tools, list) and any(map(is_mcp, tools)):
            return self._with_rounds(body, model, options, most_calls)
        if self._servers is not None and options.mcp_offer_tools and _has_no_tools(body):
            listings = self._servers.listings.values()
            offered = [as_function(each.label, tool) for each in listings for tool in each.tools]
            body = body | {"tools": offered}
        return parse_chat(body, model, options)

    def _with_rounds(
        self,
        body: dict[str, Any],
        model: ServedModel,
        options: RouterOptions,
        most_calls: int | None,
    ) -> GenerationRequest:
        if self._servers is None:
            param = f"tools[{next(i for i, tool in enumerate(body['tools']) if is_mcp(tool))}].type"
            message = f"'{param}': tools of MCP servers need a router with --mcp-config."
            raise invalid(message, param, "unsupported_value")
        _check_alone(body)
        servers, ignored = self._servers, set[str]()
        offered = offer_tools(body, servers.listings, ignored)

        def parse(body: dict[str, Any]) -> GenerationRequest:
            return parse_chat(body, model, options)

        request = parse(offered.body)
        rounds = Rounds(
            body=offered.body,
            tools=offered.tools,
            listings=offered.listings,
            parse=parse,
            run=lambda tool, arguments: servers.call(tool.label, tool.name, arguments),
            most_rounds=options.mcp_max_rounds,
            most_calls=most_calls,
        )
        return replace(request, rounds=rounds, ignored={*ignored, *request.ignored})


class McpChatCompletions(ChatCompletions):
    """POST /v1/chat/completions."""

    def __init__(self, chat: McpChat) -> None:
        self._chat = chat

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        return self._chat.parse(body, model, options)


def _has_no_tools(body: Any) -> bool:
    return isinstance(body, dict) and not any(body.get(name) for name in _TOOL_FIELDS)


def _check_alone(body: Mapping[str, Any]) -> None:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            message = f"'{name}' must be 1 with tools of MCP servers."
            raise invalid(message, name, "unsupported_value")
    if body.get("use_beam_search"):
        message = "'use_beam_search' is not available with tools of MCP servers."
        raise invalid(message, "use_beam_search", "unsupported_value")
