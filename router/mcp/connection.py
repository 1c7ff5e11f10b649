"""The connection to one MCP server: made again whenever it breaks. Needs the package ``mcp``, and
runs in the thread of all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from ...shared.process.backoff import Backoff
from ...shared.telemetry.logs import logger
from ..http.json_body import parse_text
from ..requests.json_size import size_of
from .http_transport import http_transport
from .result_text import cut, result_text
from .server_config import McpServerConfig
from .server_tools import CallOutcome, McpListing, McpTool
from .stdio_transport import stdio_transport

MAX_TOOLS = 512
MAX_PAGES = 64
# Characters and values of all definitions of a server.
MAX_DEFINITIONS = 1 << 20
MAX_CALLS = 16  # of one server at once
# A server is asked for a sign of life after a call that failed, and from time to time.
PING_SECONDS = 5.0
IDLE_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0

log = logger("router")


class McpConnection:
    """``publish`` is called with the tools whenever they change."""

    def __init__(
        self,
        config: McpServerConfig,
        publish: Callable[[McpListing], None],
        *,
        seconds: float,
        most: int,
    ) -> None:
        self._config = config
        self._publish = publish
        self._seconds = seconds
        self._most = most
        self._client: Client | None = None
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._lost_before = False  # since the last connection
        self._look = asyncio.Event()  # something may have changed

    async def run(self) -> None:
        """Keep the connection until this task is cancelled."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        task = asyncio.current_task()
        # An error that the SDK raises while it is cancelled replaces the cancellation.
        while task is not None and not task.cancelling():
            try:
                await self._connected(backoff)
            except Exception as error:
                self._lost(error)
            if not task.cancelling():
                await asyncio.sleep(backoff.pause())

    async def call(self, tool: str, arguments: str) -> CallOutcome:
        """Run a tool. Errors are outcomes."""
        try:
            given = parse_text(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return _failed("The arguments are not a JSON object.")
        try:
            async with asyncio.timeout(self._seconds), self._calls:
                return await self._call(tool, given)
        except TimeoutError:
            self._look.set()
            return _failed(f"The server did not answer within {self._seconds:g} s.")
        except MCPError as error:
            self._look.set()
            return _failed(cut(error.error.message, 1024), error.error.code)
        except Exception as error:
            # Its text may have secrets of the configuration.
            self._look.set()
            return _failed(f"The call failed: {type(error).__name__}.")

    async def _call(self, tool: str, arguments: dict[str, Any]) -> CallOutcome:
        if self._client is None:
            return _failed("The server is not connected.")
        params = mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
        # Not the session's own method, which would check results against patterns of the server.
        result = await self._client.session.send_request(
            mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult
        )
        content = [block.model_dump(mode="json", by_alias=True) for block in result.content]
        text = result_text(content, result.structured_content, self._most)
        return CallOutcome(text=text, failed=result.is_error, by_tool=True)

    async def _connected(self, backoff: Backoff) -> None:
        """Connect, publish the tools, and return when the server no longer answers."""
        client = Client(
            self._transport(),
            read_timeout_seconds=self._seconds,
            message_handler=self._take_message,
            cache=None,
        )
        async with asyncio.timeout(self._seconds) as limit:
            async with client:
                tools = await self._list(client)
                limit.reschedule(None)
                backoff.reset()
                self._lost_before = False
                self._client = client
                try:
                    self._show(tools)
                    await self._watch(client)
                finally:
                    self._client = None

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        most = max(1 << 20, 2 * self._most)
        if self._config.url:
            return http_transport(self._config, most, self._seconds)
        return stdio_transport(self._config, most)

    async def _watch(self, client: Client) -> None:
        """Ask for the tools again when they change, until the server does not answer."""
        while True:
            self._look.clear()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._look.wait()
            except TimeoutError:
                pass
            async with asyncio.timeout(PING_SECONDS):
                tools = await self._list(client)
            self._show(tools)

    async def _take_message(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._look.set()

    async def _list(self, client: Client) -> tuple[McpTool, ...]:
        """All tools, or as many as the limits allow."""
        found: dict[str, McpTool] = {}
        cursor, left = None, MAX_DEFINITIONS
        for _ in range(MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await client.session.list_tools(params=params)
            for tool in page.tools:
                texts = len(tool.name) + len(tool.description or "")
                size = size_of(tool.input_schema) + texts
                if size > left or len(found) >= MAX_TOOLS:
                    self._warn(f"has too many tools; it is used with {len(found)} of them")
                    return tuple(found.values())
                left -= size
                found.setdefault(tool.name, _tool(tool))
            cursor = page.next_cursor
            if cursor is None:
                break
        return tuple(found.values())

    def _show(self, tools: tuple[McpTool, ...]) -> None:
        self._publish(McpListing(label=self._config.label, tools=tools))

    def _lost(self, error: Exception) -> None:
        # Errors may have URLs or arguments in their texts, which may have secrets.
        kind = type(error).__name__
        if isinstance(error, BaseExceptionGroup):
            kind = type(error.exceptions[0]).__name__
        if not self._lost_before:
            self._warn(f"is not available ({kind}); it is tried again from time to time")
        self._lost_before = True
        reason = f"The server is not available ({kind})."
        self._publish(McpListing(label=self._config.label, error=reason))

    def _warn(self, text: str) -> None:
        log.warning("the MCP server %r %s", self._config.label, text)


def _tool(tool: mcp_types.Tool) -> McpTool:
    hints = tool.annotations
    return McpTool(
        name=tool.name,
        description=tool.description or "",
        schema=tool.input_schema,
        read_only=bool(hints and hints.read_only_hint),
    )


def _failed(text: str, code: int = 0) -> CallOutcome:
    return CallOutcome(text=text, failed=True, code=code)
