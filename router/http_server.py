"""The HTTP side of a router: uvicorn with its application, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from ..shared.errors import StartupError
from ..shared.process import acceptor
from ..shared.process.acceptor import Acceptor
from ..shared.process.open_files import room_for_connections, warn_of_few_connections
from ..shared.telemetry.logs import RateLimitedFilter, logger
from .app import App
from .http.protocol import bounded_protocol
from .openai.errors import error_body
from .options import RouterOptions

log = logger("router")
uvicorn_log = logging.getLogger("uvicorn.error")
connections_log = logger("router.connections")

BACKLOG = 2048


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, which belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on a listening socket."""

    def __init__(self, options: RouterOptions, app: App) -> None:
        self._options = options
        self._app = app
        # Any client can cause warnings: by invalid requests, or by too many connections.
        self._log_filter = RateLimitedFilter()
        self._max_connections = 0
        self._http: _Uvicorn | None = None
        self._acceptor: Acceptor | None = None
        self.serving: asyncio.Task[None] | None = None
        self._accepting: set[asyncio.Task[Any]] = set()

    @property
    def connections(self) -> set[Any]:
        """The open connections."""
        return self._http.server_state.connections if self._http is not None else set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections. Raises ``StartupError`` if the server ends at once."""
        limit = self._options.max_connections
        self._max_connections = room_for_connections(limit)
        warn_of_few_connections(limit, self._max_connections)
        config = uvicorn.Config(
            self._app,
            http=bounded_protocol(
                self._options, error_body, self._app.services.metrics.count_error
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self._options.keep_alive_timeout),
            # Two seconds after ``abort``, uvicorn cancels the tasks that have not ended.
            timeout_graceful_shutdown=int(self._options.drain_timeout) + 2,
        )
        for each in (uvicorn_log, connections_log):
            each.addFilter(self._log_filter)
        if self._app.mcp is not None:
            self._app.mcp.start()
        self._http = server = _Uvicorn(config)
        self._acceptor = Acceptor(listener, self.accept, "a connection")
        self.serving = asyncio.create_task(server.serve(sockets=[]))
        while not server.started:
            if self.serving.done():
                await self.serving
                raise StartupError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.005)
        self._acceptor.start()

    def accept(self, accepted: socket.socket) -> None:
        """Serve an accepted connection, or close it if the maximum is reached."""
        assert self._http is not None
        if len(self.connections) + len(self._accepting) >= self._max_connections:
            connections_log.warning(
                "closed a new connection: %d are open, which is the limit", self._max_connections
            )
            accepted.close()
            return
        config, server = self._http.config, self._http
        protocol: Callable[..., asyncio.Protocol] = config.http_protocol_class
        make = functools.partial(
            protocol,
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(loop.connect_accepted_socket(make, accepted))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def stop(self) -> None:
        """Stop listening, let requests finish until the deadline, then abort them."""
        self._app.services.draining = True
        log.info(
            "closing the listener; %d requests have %g s to finish",
            self._app.handler.active,
            self._options.drain_timeout,
        )
        if self._acceptor is not None:
            self._acceptor.stop()
        if self._http is not None and self.serving is not None:
            loop = asyncio.get_running_loop()
            deadline = loop.call_later(self._options.drain_timeout, self._app.handler.abort)
            self._http.should_exit = True
            await asyncio.gather(self.serving, return_exceptions=True)
            await self._app.handler.wait_for_background()
            deadline.cancel()
        if self._app.mcp is not None:
            await self._app.mcp.close()
        for each in (uvicorn_log, connections_log):
            each.removeFilter(self._log_filter)


def listen(options: RouterOptions) -> socket.socket:
    """A listening socket, which shares its port with other router processes if there are any.
    Raises ``StartupError``."""
    host, port = options.host, options.port
    try:
        return acceptor.listen(host, port, BACKLOG, shared=options.router_workers > 1)
    except OSError as error:
        raise acceptor.http_port_error(host, port, error) from error
