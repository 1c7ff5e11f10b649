"""All MCP servers of a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...shared.config.mcp import McpConfig
from ...shared.errors import StartupError
from ...shared.telemetry.logs import logger
from ...shared.version import install_command
from .server_config import McpServerConfig, read_servers
from .server_tools import CallOutcome, McpListing

if TYPE_CHECKING:
    from .connection import McpConnection

# Loggers of libraries that may write URLs and messages with secrets.
SILENT = ("mcp", "httpx2", "httpcore2")
STOP_SECONDS = 5.0
CONNECTING = "The server is not connected yet."

log = logger("router")


class McpServers:
    """Connections in a thread with its own event loop, so that nothing a server sends can block the
    router's loop. ``listings`` has the tools of each server by label."""

    def __init__(
        self, servers: Sequence[McpServerConfig], *, seconds: float, max_result_bytes: int
    ) -> None:
        self._servers = servers
        self._seconds = seconds
        self._max_result_bytes = max_result_bytes
        self._connections: dict[str, McpConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self.listings: Mapping[str, McpListing] = {
            server.label: McpListing(label=server.label, error=CONNECTING) for server in servers
        }

    def start(self) -> None:
        """Connect to all servers in the background."""
        self._thread.start()

    async def call(self, label: str, tool: str, arguments: str) -> CallOutcome:
        """Run a tool of a server. Errors are returned as outcomes."""
        connection = self._connections.get(label)
        if connection is None or self._loop is None:
            return CallOutcome(text=CONNECTING, failed=True)
        work = asyncio.run_coroutine_threadsafe(connection.call(tool, arguments), self._loop)
        return await asyncio.wrap_future(work)

    async def close(self) -> None:
        """Close all connections, and stop the servers that the router has started."""
        self._closing.set()
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def _run(self) -> None:
        for name in SILENT:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.warning("the MCP servers have ended: %s", type(error).__name__)

    async def _serve(self) -> None:
        # Imported on demand and off the router's loop: it takes a second.
        from .connection import McpConnection

        self._stop = asyncio.Event()
        self._connections = {
            server.label: McpConnection(
                server,
                self._publish,
                seconds=self._seconds,
                max_result_bytes=self._max_result_bytes,
            )
            for server in self._servers
        }
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(link.run()) for link in self._connections.values()]
        if not self._closing.is_set():
            await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _publish(self, listing: McpListing) -> None:
        # A new mapping each time, since the router's thread reads without a lock.
        self.listings = {**self.listings, listing.label: listing}


def mcp_servers(options: McpConfig) -> McpServers | None:
    """The servers of a router; ``None`` if there are none. Raises ``StartupError`` without the
    package ``mcp``, ``UsageError`` for an invalid configuration."""
    servers = read_servers(options)
    if not servers:
        return None
    if find_spec("mcp") is None:
        raise StartupError(f"MCP servers need the package mcp: {install_command('mcp')}")
    return McpServers(
        servers, seconds=options.mcp_timeout, max_result_bytes=options.mcp_max_result_bytes
    )
