"""Start and stop a router: ports, the HTTP and registry servers, draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator

import grpc
import uvicorn

from ..proto.tandem_pb2_grpc import add_RegistryServicer_to_server
from ..shared.errors import StartupError
from ..shared.process.probe import ProbeServer
from ..shared.security.credentials import INSECURE, Credentials, check_exposure
from ..shared.security.token_interceptor import TokenInterceptor
from ..shared.telemetry.logs import RateLimitedFilter, logger
from ..shared.telemetry.process_metrics import ProcessMetrics
from ..shared.telemetry.stats_line import log_rates
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from .app import App
from .cluster.node_table import NodeTable
from .cluster.pinned_model import read_pinned
from .cluster.registry_service import Registry
from .cluster.static_nodes import StaticNodes
from .http.protocol import bounded
from .metrics import Metrics
from .openai.error_body import error_body
from .options import RouterOptions

log = logger("router")
uvicorn_log = logging.getLogger("uvicorn.error")

BACKLOG = 2048
# How long a thread that parses or renders keeps the GIL from the event loop, each time that the
# loop returns from the system. With Python's default of 5 ms, two such threads delay it by 30 to
# 50 ms, with this by less than 15.
SWITCH_SECONDS = 0.0005
# A node usually has one call at a time; more of them wait, and fail only in a flood.
REGISTRY_CALLS_A_NODE = 2


class _HttpServer(uvicorn.Server):
    """Leaves signals to the caller of ``run_router``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """One HTTP server, one registry, and the prefill nodes of --pd-url.

    Call ``start``, then ``stop``; the ports are known in between.
    """

    def __init__(
        self,
        options: RouterOptions,
        tracer: Tracer = NO_TRACER,
        credentials: Credentials = INSECURE,
    ) -> None:
        self.options = options
        self._credentials = credentials
        self.http_port = 0
        self.registry_port = 0
        self.metrics_port = 0
        self.nodes = NodeTable(options.node_timeout, credentials=credentials)
        self.registry = Registry(options, self.nodes)
        self.metrics = Metrics(self.nodes)
        self.metrics.served = self.registry.served_name
        self.app = App(options, self.nodes, self.registry, self.metrics, tracer)
        self._interceptor = TokenInterceptor(credentials, "tandem_registry_calls_refused")
        self.metrics.add(self._interceptor.refused)
        self._process = ProcessMetrics(self.metrics.registry, credentials)
        self._metrics_page = ProbeServer("--metrics-port")
        self._static = StaticNodes(
            self.nodes, self.registry, options.prefill_addresses, credentials
        )
        # uvicorn logs every invalid request and upgrade, which any client can send.
        self._log_filter = RateLimitedFilter()
        self._http: _HttpServer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start listening. Raises ``StartupError`` if a port is taken, ``ModelError`` if the model
        cannot be read, ``UsageError`` if the registry would be open to other machines."""
        check_exposure(
            self._credentials,
            self.options.insecure,
            {"--registry-host": self.options.registry_host},
        )
        # Texts are tokenized one at a time: tokenizers' own thread pool would only cost memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.registry.pin(await read_pinned(self.options))
        if self.app.services.batches is not None:
            await self.app.services.batches.open()
        listener = _listen(self.options.host, self.options.port)
        self.http_port = listener.getsockname()[1]
        try:
            await self._start_registry()
            await self._start_metrics()
        except BaseException:
            listener.close()
            raise
        self._loops = [
            asyncio.create_task(loop)
            for loop in (
                self.registry.watch(),
                self._static.run(),
                self._process.watch(),
                log_rates(self.options.stats_interval, self.metrics.work, log),
            )
        ]
        if self.app.services.batches is not None:
            self._loops.append(asyncio.create_task(self.app.services.batches.run()))
        await self._start_http(listener)

    async def retire(self) -> None:
        """Turn /ready off, and keep serving for a while: a load balancer sends new requests until
        it notices."""
        self.app.services.draining = True
        delay = self.options.shutdown_delay
        log.info("stopping: no longer ready, and serving for another %g s", delay)
        await asyncio.sleep(delay)

    async def stop(self) -> None:
        """Stop listening, let requests finish until the deadline, then abort them."""
        self.app.services.draining = True
        log.info(
            "closing the listener; %d requests have %g s to finish",
            self.app.handler.active,
            self.options.drain_timeout,
        )
        if self._http is not None and self._serving is not None:
            loop = asyncio.get_running_loop()
            deadline = loop.call_later(self.options.drain_timeout, self.app.handler.abort)
            self._http.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            await self.app.handler.ended()
            deadline.cancel()
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self.app.services.batches is not None:
            await self.app.services.batches.close()
        await self._metrics_page.stop()
        await self.nodes.close()
        if self._grpc is not None:
            await self._grpc.stop(grace=0.5)
        self.app.close()
        log.info("ended")
        uvicorn_log.removeFilter(self._log_filter)

    async def failed(self) -> None:
        """Wait until a part of the router ends by itself; raise its error."""
        assert self._serving is not None
        parts = (self._serving, *self._loops)
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _start_registry(self) -> None:
        # With SO_REUSEPORT a second router on the port would silently take half of the calls.
        self._grpc = grpc.aio.server(
            options=(("grpc.so_reuseport", 0),),
            interceptors=(self._interceptor,),
            maximum_concurrent_rpcs=max(1024, REGISTRY_CALLS_A_NODE * self.options.max_nodes),
        )
        add_RegistryServicer_to_server(self.registry, self._grpc)
        self.registry_port = self._credentials.bind(
            self._grpc, self.options.registry_host, self.options.registry_port, "the registry"
        )
        await self._grpc.start()

    async def _start_metrics(self) -> None:
        options = self.options
        if options.metrics_port is not None:
            host = options.metrics_host or options.host
            self.metrics_port = await self._metrics_page.start(host, options.metrics_port)
            self._metrics_page.show(self._takes_work, self.metrics.page)

    def _takes_work(self) -> bool:
        return not self.app.services.draining and self.nodes.decode_ready()

    async def _start_http(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            self.app,
            http=bounded(self.options, error_body),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(self.options.keep_alive_timeout),
            # After ``abort``; whatever has not ended by then is cancelled.
            timeout_graceful_shutdown=int(self.options.drain_timeout) + 2,
            backlog=BACKLOG,
        )
        uvicorn_log.addFilter(self._log_filter)
        self._http = server = _HttpServer(config)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            if self._serving.done():
                await self._serving
                raise StartupError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.005)


async def run_router(
    options: RouterOptions,
    stop: asyncio.Event,
    on_ready: Callable[[Router], None],
    tracer: Tracer = NO_TRACER,
    credentials: Credentials = INSECURE,
) -> None:
    """Run until ``stop`` is set, then drain. The caller handles signals, and sets ``stop``.

    Raises ``StartupError``, and the error of any part of the router that ends by itself.
    """
    router = Router(options, tracer, credentials)
    router.app.services.shut_down = stop.set
    sys.setswitchinterval(SWITCH_SECONDS)
    await router.start()
    # Imported objects live as long as the process: keep them out of garbage collections.
    gc.freeze()
    log.info("listening on %s:%d", options.host, router.http_port)
    if router.metrics_port:
        log.info("metrics on port %d", router.metrics_port)

    async def until_retired() -> None:
        await stop.wait()
        await router.retire()

    retired = asyncio.create_task(until_retired())
    failed = asyncio.create_task(router.failed())
    try:
        on_ready(router)
        await asyncio.wait((retired, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await failed
    finally:
        for task in (retired, failed):
            task.cancel()
        await asyncio.gather(retired, failed, return_exceptions=True)
        await router.stop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol, asyncio turns off Nagle's algorithm for accepted connections; it
    # would delay tokens by up to 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; choose another --host or "
            f"--port"
        ) from error
    return listener
