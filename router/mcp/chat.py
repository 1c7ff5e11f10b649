"""Chat completions with the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...shared.errors import UnavailableError
from ..errors import invalid
from ..generation import Generate, GenerationRequest, Outputs, extended
from ..http.memory_budget import MemoryBudget
from ..http.parsing import ParserPools
from ..openai.chat_formatter import ChatFormatter
from ..openai.chat_request import ChatRequest, count_chat_tokens, parse_chat
from ..openai.surfaces import ChatCompletions
from ..openai.tools.grammars import NO_GRAMMARS, ToolGrammars
from ..options import RouterOptions
from ..requests.mcp_tools import model_name
from ..served_model import ServedModel
from .approvals import ApprovalResponse
from .chat_formatter import McpChatFormatter
from .request_approvals import RequestApprovals
from .rounds import Parsing, Rounds
from .servers import McpServers
from .tools import ToolOffer, as_function, is_mcp, offer_tools

# An estimate of a prompt's size, to choose the threads that parse it.
CHARACTERS_OF_TOKEN = 4
_TOOL_FIELDS = ("tools", "functions", "tool_choice", "function_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpChatRequest(ChatRequest):
    """A chat, and its ``rounds`` if it uses servers."""

    rounds: Rounds | None = None


class McpChat:
    """Chats that may use the tools of the router's servers, if there are any. ``parsers`` parse the
    prompts of later rounds, and ``prompts`` accounts for their memory."""

    def __init__(
        self, servers: McpServers | None, parsers: ParserPools, prompts: MemoryBudget
    ) -> None:
        self._servers = servers
        self._parsers = parsers
        self._prompts = prompts

    @property
    def has_servers(self) -> bool:
        return self._servers is not None

    def parse(
        self,
        body: Any,
        model: ServedModel,
        options: RouterOptions,
        *,
        max_calls: int | None = None,
        approvals: RequestApprovals | None = None,
        grammars: ToolGrammars = NO_GRAMMARS,
    ) -> ChatRequest:
        """Check a body and tokenize it. ``max_calls``, ``approvals`` and ``grammars`` are for APIs
        that support them. Raises ``RequestError``."""
        if _names_servers(body):
            return self._with_rounds(body, model, options, max_calls, approvals, grammars)
        if approvals is not None:
            _check_responses(approvals.responses, ToolOffer(body))
        return parse_chat(self._with_offer(body, options), model, options, grammars)

    def outputs(self, request: GenerationRequest, generate: Generate, owner: str) -> Outputs:
        """The outputs of all rounds of a request. Their prompts are parsed in the ``owner``'s
        turn."""
        if not isinstance(request, McpChatRequest) or request.rounds is None:
            return generate(request)
        return request.rounds.outputs(request, generate, self._parsing(request, owner))

    @contextmanager
    def _parsing(self, request: ChatRequest, owner: str) -> Iterator[Parsing]:
        with self._prompts.share() as prompts:

            async def parse(work: Callable[[], ChatRequest]) -> ChatRequest:
                size = CHARACTERS_OF_TOKEN * request.prompt_tokens
                parsed = await self._parsers.run(("rounds", owner), size, work)
                prompts.take(parsed.prompt_tokens)
                return parsed

            yield parse

    def count_tokens(self, body: Any, model: ServedModel, options: RouterOptions) -> int:
        """The length of a chat's prompt. Raises ``RequestError``."""
        if _names_servers(body):
            body = self._replaced(body, set(), approvals=True)[1].body
        return count_chat_tokens(self._with_offer(body, options), model, options)

    def _with_offer(self, body: Any, options: RouterOptions) -> Any:
        """The body with the tools of all servers, if it has no tools and the operator enables
        this."""
        if self._servers is None or not options.mcp_offer_tools or not _has_no_tools(body):
            return body
        listings = self._servers.listings.values()
        tools = [as_function(listing.label, tool) for listing in listings for tool in listing.tools]
        return body | {"tools": tools}

    def _replaced(
        self, body: dict[str, Any], ignored: set[str], *, approvals: bool
    ) -> tuple[McpServers, ToolOffer]:
        """The servers, and the body with functions in place of their tools."""
        if self._servers is None:
            param = f"tools[{next(i for i, tool in enumerate(body['tools']) if is_mcp(tool))}].type"
            message = f"'{param}': tools of MCP servers need a router with --mcp-config."
            raise invalid(message, param, "unsupported_value")
        _check_alone(body)
        listings = self._servers.listings
        return self._servers, offer_tools(body, listings, ignored, approvals=approvals)

    def _with_rounds(
        self,
        body: dict[str, Any],
        model: ServedModel,
        options: RouterOptions,
        max_calls: int | None,
        approvals: RequestApprovals | None,
        grammars: ToolGrammars,
    ) -> McpChatRequest:
        ignored: set[str] = set()
        servers, offer = self._replaced(body, ignored, approvals=approvals is not None)
        if approvals is not None:
            _check_responses(approvals.responses, offer)

        def parse(body: dict[str, Any]) -> ChatRequest:
            return parse_chat(body, model, options, grammars)

        request = parse(offer.body)
        rounds = Rounds(
            body=offer.body,
            tools=offer.tools,
            guarded=offer.guarded,
            approvals=approvals,
            listings=offer.listings,
            parse=parse,
            run=lambda tool, arguments: servers.call(tool.label, tool.name, arguments),
            max_rounds=options.mcp_max_rounds,
            max_calls=max_calls,
        )
        ignored |= request.ignored
        return extended(McpChatRequest, request, ignored=ignored, rounds=rounds)


class McpChatCompletions(ChatCompletions):
    """POST /v1/chat/completions of a router with servers, for one owner."""

    def __init__(self, chat: McpChat, owner: str) -> None:
        self._chat = chat
        self._owner = owner

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> ChatRequest:
        return self._chat.parse(body, model, options)

    def formatter(self, request: GenerationRequest, created: int) -> ChatFormatter:
        if not isinstance(request, McpChatRequest) or request.rounds is None:
            return super().formatter(request, created)
        return McpChatFormatter(request, created, request.rounds.tools)

    def outputs(self, request: GenerationRequest, generate: Generate) -> Outputs:
        return self._chat.outputs(request, generate, self._owner)


def _names_servers(body: Any) -> bool:
    tools = body.get("tools") if isinstance(body, dict) else None
    return isinstance(tools, list) and any(map(is_mcp, tools))


def _has_no_tools(body: Any) -> bool:
    return isinstance(body, dict) and not any(body.get(name) for name in _TOOL_FIELDS)


def _check_responses(responses: Sequence[ApprovalResponse], offer: ToolOffer) -> None:
    """Check that the request offers the tools of the calls that it responds to."""
    for response in responses:
        label, name = response.tool.label, response.tool.name
        if label not in offer.errors:
            message = f"'tools' must have the MCP server '{label}', whose call is answered."
            raise invalid(message, "tools", "missing_required_parameter")
        if response.approve and model_name(label, name) not in offer.tools:
            if offer.errors[label] is not None:
                message = f"The MCP server '{label}' of the approved call is not available."
                raise UnavailableError(message)
            message = f"'tools' does not offer the approved tool '{name[:64]}' of '{label}'."
            raise invalid(message, "tools", "invalid_value")


def _check_alone(body: Mapping[str, Any]) -> None:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            message = f"'{name}' must be 1 with tools of MCP servers."
            raise invalid(message, name, "unsupported_value")
    if body.get("use_beam_search"):
        message = "'use_beam_search' is not available with tools of MCP servers."
        raise invalid(message, "use_beam_search", "unsupported_value")
