"""A router's life: ports, the two servers, draining."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import uvicorn

from ..proto.tandem_pb2_grpc import add_RegistryServicer_to_server
from ..shared.errors import StartupError
from ..shared.telemetry import logger
from .app import App
from .metrics import Metrics
from .nodes import NodeTable
from .options import RouterOptions
from .protocol import bounded
from .registry import Registry

log = logger("router")

BACKLOG = 2048
MAX_REGISTRY_CALLS = 1024


class _HttpServer(uvicorn.Server):
    """Signals belong to whoever runs the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """One HTTP server and one registry. ``start``, then ``stop``; the ports are known between."""

    def __init__(self, options: RouterOptions) -> None:
        self.options = options
        self.http_port = 0
        self.registry_port = 0
        self.nodes = NodeTable(options.node_timeout)
        self.registry = Registry(options, self.nodes)
        self.metrics = Metrics(self.nodes)
        self.app = App(options, self.nodes, self.registry, self.metrics)
        self._http: _HttpServer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Listening when it returns. ``StartupError``: a port is taken, the model is unreadable."""
        # One text at a time: tokenizers' own thread pool would only cost memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        listener = _listen(self.options.host, self.options.port)
        self.http_port = listener.getsockname()[1]
        try:
            await self.registry.preload()
            await self._start_registry()
        except BaseException:
            listener.close()
            raise
        self._tasks.append(asyncio.create_task(self.registry.watch()))
        await self._start_http(listener)

    async def stop(self) -> None:
        """Take no more, let the streams finish until the deadline, then end them."""
        self.app.draining = True
        if self._http is not None:
            loop = asyncio.get_running_loop()
            deadline = loop.call_later(self.options.drain_timeout, self.app.abort)
            self._http.should_exit = True
            await asyncio.gather(*self._tasks[1:], return_exceptions=True)
            deadline.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.nodes.close()
        if self._grpc is not None:
            await self._grpc.stop(grace=0.5)
        self.app.close()

    async def failed(self) -> None:
        """Returns, or raises, when a part of the router ends by itself."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _start_registry(self) -> None:
        # Without SO_REUSEPORT a second router on the port is an error, not a silent half share.
        self._grpc = grpc.aio.server(
            options=(("grpc.so_reuseport", 0),), maximum_concurrent_rpcs=MAX_REGISTRY_CALLS
        )
        add_RegistryServicer_to_server(self.registry, self._grpc)
        host = self.options.registry_host
        address = f"[{host}]" if ":" in host else host
        try:
            self.registry_port = self._grpc.add_insecure_port(
                f"{address}:{self.options.registry_port}"
            )
        except RuntimeError:
            raise _taken(host, self.options.registry_port, "registry") from None
        await self._grpc.start()

    async def _start_http(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            self.app,
            http=bounded(self.options),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self.options.keep_alive_timeout),
            # After ``abort``; what has not ended by then is cancelled.
            timeout_graceful_shutdown=int(self.options.drain_timeout) + 2,
            backlog=BACKLOG,
        )
        self._http = server = _HttpServer(config)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        while not server.started:
            if self._tasks[-1].done():
                await self._tasks[-1]
                raise StartupError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.005)


async def run_router(
    options: RouterOptions,
    *,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run until ``stop`` is set, then drain. Signals are the caller's: set ``stop`` from them."""
    router = Router(options)
    stop = stop or asyncio.Event()
    await router.start()
    log.info("listening on %s:%d", options.host, router.http_port)
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(router.failed())]
    try:
        if ready is not None:
            ready()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[1].done():
            await waits[1]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await router.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _taken(host, port, "HTTP", error.strerror) from error
    return listener


def _taken(host: str, port: int, what: str, why: str | None = None) -> StartupError:
    reason = why or "the port is taken, or the address is not this machine's"
    return StartupError(f"cannot listen on {host}:{port} for {what}: {reason}; choose another port")
