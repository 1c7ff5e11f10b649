"""The connection to one MCP server, reopened whenever it breaks. Needs the package ``mcp``, and
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
from ..requests.json_size import json_text, size_of
from .http_transport import http_transport
from .server_config import McpServerConfig
from .server_tools import CallOutcome, McpListing, McpTool
from .stdio_transport import stdio_transport

MAX_TOOLS = 512
MAX_PAGES = 64
# Characters and values in all tool definitions of a server.
MAX_DEFINITIONS = 1 << 20
MAX_CALLS = 16  # to one server at once
# The server is probed after a call that failed, and when idle.
PING_SECONDS = 5.0
IDLE_SECONDS = 60.0
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0

log = logger("router")


class McpConnection:
    """Calls ``publish`` with the tools whenever they change."""

    def __init__(
        self,
        config: McpServerConfig,
        publish: Callable[[McpListing], None],
        *,
        seconds: float,
        max_result_bytes: int,
    ) -> None:
        self._config = config
        self._publish = publish
        self._seconds = seconds
        self._max_result_bytes = max_result_bytes
        self._client: Client | None = None
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._lost = False  # lost, and not connected since
        self._changed = asyncio.Event()  # the tools or the connection may have changed

    async def run(self) -> None:
        """Keep the connection until this task is cancelled."""
        backoff = Backoff(FIRST_PAUSE, MAX_PAUSE)
        task = asyncio.current_task()
        # An error that the SDK raises while it is cancelled replaces the cancellation.
        while task is not None and not task.cancelling():
            try:
                await self._connected(backoff)
            except Exception as error:
                self._publish_loss(error)
            if not task.cancelling():
                await asyncio.sleep(backoff.pause())

    async def call(self, tool: str, arguments: str) -> CallOutcome:
        """Run a tool. Errors are returned as outcomes."""
        try:
            parsed = parse_text(arguments or "{}")
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            return _failed("The arguments are not a JSON object.")
        try:
            async with asyncio.timeout(self._seconds), self._calls:
                return await self._call(tool, parsed)
        except TimeoutError:
            self._changed.set()
            return _failed(f"The server did not answer within {self._seconds:g} s.")
        except MCPError as error:
            self._changed.set()
            return _failed(_cut(error.error.message, 1024), error.error.code)
        except Exception as error:
            # The error's text may have secrets of the configuration.
            self._changed.set()
            return _failed(f"The call failed: {type(error).__name__}.")

    async def _call(self, tool: str, arguments: dict[str, Any]) -> CallOutcome:
        if self._client is None:
            return _failed("The server is not connected.")
        params = mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
        # The session's own method would match results against patterns of the server.
        result = await self._client.session.send_request(
            mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult
        )
        content = [block.model_dump(mode="json", by_alias=True) for block in result.content]
        text = _result_text(content, result.structured_content, self._max_result_bytes)
        return CallOutcome(text=text, failed=result.is_error, by_tool=True)

    async def _connected(self, backoff: Backoff) -> None:
        """Connect and publish the tools; return when the server stops replying."""
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
                self._lost = False
                self._client = client
                try:
                    self._show(tools)
                    await self._watch(client)
                finally:
                    self._client = None

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        max_bytes = max(1 << 20, 2 * self._max_result_bytes)
        if self._config.url:
            return http_transport(self._config, max_bytes, self._seconds)
        return stdio_transport(self._config, max_bytes)

    async def _watch(self, client: Client) -> None:
        """List the tools again when they may have changed, until the server fails to reply."""
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            async with asyncio.timeout(PING_SECONDS):
                tools = await self._list(client)
            self._show(tools)

    async def _take_message(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._changed.set()

    async def _list(self, client: Client) -> tuple[McpTool, ...]:
        """All tools, or as many as the limits allow."""
        tools: dict[str, McpTool] = {}
        cursor, remaining = None, MAX_DEFINITIONS
        for _ in range(MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await client.session.list_tools(params=params)
            for tool in page.tools:
                texts = len(tool.name) + len(tool.description or "")
                size = size_of(tool.input_schema) + texts
                if size > remaining or len(tools) >= MAX_TOOLS:
                    self._warn(f"has too many tools; only the first {len(tools)} are used")
                    return tuple(tools.values())
                remaining -= size
                tools.setdefault(tool.name, _tool(tool))
            cursor = page.next_cursor
            if cursor is None:
                break
        return tuple(tools.values())

    def _show(self, tools: tuple[McpTool, ...]) -> None:
        self._publish(McpListing(label=self._config.label, tools=tools))

    def _publish_loss(self, error: Exception) -> None:
        # Error texts may contain URLs or arguments with secrets.
        kind = type(error).__name__
        if isinstance(error, BaseExceptionGroup):
            kind = type(error.exceptions[0]).__name__
        if not self._lost:
            self._warn(f"is not available ({kind}); retrying from time to time")
        self._lost = True
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


def _result_text(content: list[Any], structured: Any, max_bytes: int) -> str:
    """The text of a result's content blocks, which are dicts; of its structured value if it has no
    blocks."""
    text = "\n".join(_block_text(block) for block in content)
    if not content and structured is not None:
        text = json_text(structured)
    return _cut(text, max_bytes)


def _cut(text: str, max_bytes: int) -> str:
    """The text in at most ``max_bytes`` bytes, with a note if it was truncated."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = f"\n[cut: the result has {len(data)} bytes]"
    return data[: max(0, max_bytes - len(note))].decode(errors="ignore") + note


def _block_text(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(text := block.get("resource", {}).get("text"), str):
        return text
    if kind == "resource_link":
        return f"[resource {block.get('uri')}]"
    return f"[{kind} left out: the model takes text only]"
