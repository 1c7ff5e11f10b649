"""Start and stop a router: ports, the HTTP and registry servers, draining."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable

from ..shared.host_port import join_host_port
from ..shared.process.probe import ProbeServer
from ..shared.process.tasks import first_end
from ..shared.security.credentials import INSECURE, Credentials
from ..shared.telemetry.logs import logger
from ..shared.telemetry.process_metrics import ProcessMetrics
from ..shared.telemetry.stats_line import log_rates
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from .app import App
from .cluster.node_table import NodeTable
from .cluster.pinned_model import read_pinned
from .cluster.registry_service import Registry
from .cluster.static_nodes import StaticNodes
from .http_server import HttpServer, listen
from .options import RouterOptions
from .registry_server import RegistryServer
from .telemetry.metrics import Metrics

log = logger("router")

# How long a thread that parses or renders may hold the GIL when the event loop returns from a
# system call. With Python's default of 5 ms, two such threads delay the loop by 30 to 50 ms; with
# this value by less than 15 ms.
SWITCH_SECONDS = 0.0005
# Maximum digits of an integer in a body.
MAX_DIGITS = 640
# Nodes try to reach a lost router every three seconds.
REJOIN_SECONDS = 5.0
REJOIN_POLL_SECONDS = 0.05


class Router:
    """One HTTP server, one registry, and the prefill nodes of --pd-url. The ports are known after
    ``start``."""

    def __init__(
        self,
        options: RouterOptions,
        tracer: Tracer = NO_TRACER,
        credentials: Credentials = INSECURE,
        registry_server: RegistryServer | None = None,
    ) -> None:
        """``registry_server`` is passed in if its port is bound already."""
        self.options = options
        self.http_port = 0
        self.registry_port = 0
        self.metrics_port = 0
        self.nodes = NodeTable(options.node_timeout, credentials=credentials)
        self.registry = Registry(options, self.nodes)
        self.nodes.on_doubt = self.registry.reachability.doubt
        self.metrics = Metrics(self.nodes)
        self.metrics.served_model = self.registry.served_name
        self.app = App(options, self.nodes, self.registry, self.metrics, tracer)
        self._registry_server = registry_server or RegistryServer(options, credentials)
        self.metrics.add(self._registry_server.refused)
        self._process = ProcessMetrics(self.metrics.registry, credentials)
        self._metrics_page = ProbeServer("--metrics-port")
        self._static = StaticNodes(
            self.nodes, self.registry, options.prefill_addresses, credentials
        )
        self._http = HttpServer(options, self.app)
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start listening. Raises ``StartupError`` if a port is taken, ``ModelError`` if the model
        cannot be read, ``UsageError`` if the registry would be open to other machines. On an error
        or cancellation, everything is closed again."""
        # Texts are tokenized one at a time: tokenizers' own thread pool would only cost memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            # First, so that probes get a response during the model's download.
            await self._start_metrics()
            self.registry.pin(await read_pinned(self.options))
            await self._serve()
        except BaseException:
            if self._http.serving is not None:
                await self._http.stop()
            await self._close()
            raise

    async def _serve(self) -> None:
        await self.app.open()
        self.registry_port = await self._registry_server.start(self.registry)
        self._loops = [
            asyncio.create_task(loop)
            for loop in (
                self.registry.watch(),
                self._static.run(),
                self._process.watch(),
                self.app.services.runs.watch(),
                log_rates(self.options.stats_interval, self.metrics.work, log),
            )
        ]
        if (batches := self.app.services.batches) is not None:
            self._loops.append(asyncio.create_task(batches.run()))
        if self.options.router_workers > 1:
            await self._wait_until_usable()
        listener = listen(self.options)
        self.http_port = listener.getsockname()[1]
        await self._http.start(listener)

    async def _wait_until_usable(self) -> None:
        """Wait for a usable node, but only a few seconds. Until then, other routers on the same
        port get all requests, and nodes of a restarted router rejoin."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REJOIN_SECONDS
        while self.registry.unready() and loop.time() < deadline:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(REJOIN_POLL_SECONDS)

    async def retire(self) -> None:
        """Fail /ready, and keep serving for --shutdown-delay: load balancers send requests until
        they notice."""
        self.app.services.draining = True
        delay = self.options.shutdown_delay
        log.info("stopping: no longer ready, and serving for another %g s", delay)
        await asyncio.sleep(delay)

    async def stop(self) -> None:
        """Stop listening, let requests finish until the deadline, then abort them."""
        await self._http.stop()
        await self._close()
        log.info("ended")

    async def _close(self) -> None:
        """Close everything but the HTTP server."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self.app.services.batches is not None:
            await self.app.services.batches.close()
        await self._metrics_page.stop()
        await self.nodes.close()
        await self._registry_server.stop()
        await self.app.close()

    def parts(self) -> list[asyncio.Task[None]]:
        """The tasks of a started router. It must stop if one of them ends."""
        assert self._http.serving is not None
        return [self._http.serving, *self._loops]

    async def _start_metrics(self) -> None:
        options = self.options
        if options.metrics_port is not None:
            host = options.metrics_host or options.host
            self.metrics_port = await self._metrics_page.start(host, options.metrics_port)
            self._metrics_page.show(self._unready, self.metrics.page)

    def _unready(self) -> str:
        return "draining" if self.app.services.draining else self.registry.unready()


async def run_router(
    options: RouterOptions,
    stop: asyncio.Event,
    on_ready: Callable[[Router], None],
    tracer: Tracer = NO_TRACER,
    credentials: Credentials = INSECURE,
    registry_server: RegistryServer | None = None,
) -> None:
    """Run until ``stop`` is set, then drain. The caller handles signals, and sets ``stop``.
    ``registry_server`` is passed in if its port is bound already.

    Raises ``StartupError``, and the error of any part of the router that ends on its own.
    """
    router = Router(options, tracer, credentials, registry_server)
    router.app.services.shut_down = stop.set
    await run(router, stop, lambda: on_ready(router))


async def run(router: Router, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Run a router until ``stop`` is set, then drain it. If ``stop`` is set during the start, end
    at once, without the delay for load balancers."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # Conversion takes time quadratic in the number of digits.
    sys.set_int_max_str_digits(MAX_DIGITS)
    if not await _start(router, stop):
        log.info("stopped while it was starting")
        return
    # Imported objects live as long as the process, so the garbage collector need not scan them.
    gc.freeze()
    log.info("listening on %s", join_host_port(router.options.host, router.http_port))
    if router.metrics_port:
        log.info("metrics on port %d", router.metrics_port)

    async def retire_on_stop() -> None:
        await stop.wait()
        await router.retire()

    retired = asyncio.create_task(retire_on_stop())
    failed = asyncio.create_task(first_end(router.parts()))
    try:
        on_ready()
        await asyncio.wait((retired, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await failed
    finally:
        for task in (retired, failed):
            task.cancel()
        await asyncio.gather(retired, failed, return_exceptions=True)
        await router.stop()


async def _start(router: Router, stop: asyncio.Event) -> bool:
    """Start a router. False if ``stop`` was set first, which cancels the start."""
    starting = asyncio.create_task(router.start())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
    if starting.cancelled():
        return False
    await starting
    return True
