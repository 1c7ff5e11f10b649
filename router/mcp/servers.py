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

# Loggers of libraries, which may write URLs and messages with secrets.
SILENT = ("mcp", "httpx2", "httpcore2")
STOP_SECONDS = 5.0
CONNECTING = "The server is not connected yet."

log = logger("router")


class McpServers:
    """Connections in a thread with a loop of its own, so that nothing that a server sends holds the
    router's loop. ``listings`` has the tools of each server by its label."""

    def __init__(self, servers: Sequence[McpServerConfig], *, seconds: float, most: int) -> None:
        self._servers = servers
        self._seconds = seconds
        self._most = most
        self._connections: dict[str, McpConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self.listings: Mapping[str, McpListing] = {
            server.label: McpListing(label=server.label, error=CONNECTING) for server in servers
        }

    def start(self) -> None:
        """Connect to all servers, in the background."""
        self._thread.start()

    async def call(self, label: str, tool: str, arguments: str) -> CallOutcome:
        """Run a tool of a server. Errors are outcomes."""
        connection = self._connections.get(label)
        if connection is None or self._loop is None:
            return CallOutcome(text=CONNECTING, failed=True)
        work = asyncio.run_coroutine_threadsafe(connection.call(tool, arguments), self._loop)
        return await asyncio.wrap_future(work)

    async def close(self) -> None:
        """Close all connections, and end the servers that the router has started."""
        self._closing.set()
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
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
        # On demand and off the router's loop: the SDK takes a second to import.
        from .connection import McpConnection

        self._stop = asyncio.Event()
        self._connections = {
            server.label: McpConnection(
                server, self._publish, seconds=self._seconds, most=self._most
            )
            for server in self._servers
        }
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(each.run()) for each in self._connections.values()]
        if not self._closing.is_set():
            await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _publish(self, listing: McpListing) -> None:
        # A new mapping each time: the router's thread reads without a lock.
        self.listings = {**self.listings, listing.label: listing}


def mcp_servers(options: McpConfig) -> McpServers | None:
    """The servers of a router; ``None`` without any. Raises ``StartupError`` without the package
    ``mcp``, ``UsageError`` for an invalid configuration."""
    servers = read_servers(options)
    if not servers:
        return None
    if find_spec("mcp") is None:
        raise StartupError(f"MCP servers need the package mcp: {install_command('mcp')}")
    return McpServers(servers, seconds=options.mcp_timeout, most=options.mcp_max_result_bytes)
