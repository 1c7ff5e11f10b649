"""The keeper of a router's workers: one registry, one view of the nodes, and what all share.

It listens where nodes join, and tells its workers of every change; they serve HTTP. A worker that
hears nothing from it goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.errors import RequestError, StartupError
from ...shared.process.parts import first_end
from ...shared.process.probe import ProbeServer
from ...shared.security.credentials import Credentials
from ...shared.telemetry.logs import logger
from ...shared.telemetry.process_metrics import ProcessMetrics
from ..cluster.node_commands import UnknownNodeError
from ..cluster.pinned_model import read_pinned
from ..cluster.registry_service import Registry
from ..cluster.static_nodes import StaticNodes
from ..mcp.mcp_servers import mcp_servers
from ..options import RouterOptions
from ..telemetry.metrics import Metrics
from .fair_accept import ConnectionCounts
from .http_front import listen
from .merged_metrics import MergedPage
from .merged_usage import MergedUsage
from .node_messages import KeptCommands, KeptNodes, PlacedLoads, introduce, pack_loads, unpack_loads
from .process_link import GATHER_SECONDS, Link, LinkClosedError, Topic
from .registry_front import RegistryFront
from .shared_responses import NO_ITEMS, refusal_of
from .worker_process import WorkerProcess

log = logger("router")

START_SECONDS = 120.0
# Time that workers may take to end beyond --drain-timeout.
STOP_SECONDS = 5.0
# How often absent nodes are told if they have changed, and if they have not: a worker forgets those
# that it is not told of again.
ABSENT_SECONDS = 1.0
ABSENT_AGAIN_SECONDS = 60.0
# The path of a Unix socket has at most 107 characters.
MAX_FOLDER = 80


class Keeper:
    """Call ``start``, then ``stop``; the ports are known in between."""

    def __init__(
        self,
        options: RouterOptions,
        shut_down: Callable[[], None],
        credentials: Credentials,
        registry_front: RegistryFront | None = None,
    ) -> None:
        mcp_servers(options)  # if they are configured wrongly, no worker would start
        self.options = options
        self.http_port = self.registry_port = self.metrics_port = 0
        self._shut_down = shut_down
        self.nodes = KeptNodes(self._publish, options.node_timeout, credentials=credentials)
        self.registry = Registry(options, self.nodes)
        self.registry.commands = KeptCommands(self._publish, options, self.nodes)
        self.metrics = Metrics(self.nodes)
        self.metrics.served = self.registry.served_name
        self._registry_front = registry_front or RegistryFront(options, credentials)
        self.metrics.add(self._registry_front.refused)
        self._process = ProcessMetrics(self.metrics.registry, credentials)
        self._static = StaticNodes(
            self.nodes, self.registry, options.prefill_addresses, credentials
        )
        self._page = MergedPage(self.metrics, self._gather_by_number)
        self.registry.files_of_workers = self._page.most_open_files
        self._usage = MergedUsage(self._gather_by_number)
        self._metrics_page = ProbeServer("--metrics-port")
        self._loads = PlacedLoads()
        self._listener: socket.socket | None = None
        self._workers: list[WorkerProcess] = []
        self._running: list[asyncio.Task[None]] = []
        self._loops: list[asyncio.Task[None]] = []
        self._introducing: set[asyncio.Task[None]] = set()
        self._until_end = ExitStack()
        self._folder = Path()
        self._connections: ConnectionCounts
        self._all_serve = asyncio.Event()
        self._draining = False

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start listening, and wait until all workers serve. Raises what ``Router.start`` does."""
        options = self.options
        if options.metrics_port is not None:
            # First: probes are answered while the model is read, which may be a long download.
            host = options.metrics_host or options.host
            self.metrics_port = await self._metrics_page.start(host, options.metrics_port)
            self._metrics_page.show(self._unready, self._page.get)
        try:
            self.registry.pin(await read_pinned(options))
            self._listener = listener = listen(options.host, options.port)
            self.http_port = listener.getsockname()[1]
            self.registry_port = await self._registry_front.start(self.registry)
        except BaseException:
            await self._metrics_page.stop()
            raise
        self._loops = [
            asyncio.create_task(loop)
            for loop in (
                self.registry.watch(),
                self._static.run(),
                self._process.watch(),
                self._publish_absent(),
                self._usage.run(),
            )
        ]
        self._folder = self._until_end.enter_context(_private_folder())
        self._connections = ConnectionCounts(self._folder / "connections", options.router_workers)
        for number in range(options.router_workers):
            self._connections.gone(number)
        command, started = sys.argv[1:], self.registry.started
        self._workers = [
            WorkerProcess(
                number, listener, started, self._folder, self._link_to, self._changed, command
            )
            for number in range(options.router_workers)
        ]
        self._running = [asyncio.create_task(worker.run()) for worker in self._workers]
        await self._until_whole()

    async def retire(self) -> None:
        """Turn /ready off everywhere, and keep serving for a while."""
        self._draining = True
        self._publish(Topic.RETIRE, b"")
        delay = self.options.shutdown_delay
        log.info("stopping: no longer ready, and serving for another %g s", delay)
        await asyncio.sleep(delay)

    async def stop(self) -> None:
        """Close the port, and let the workers finish their requests until the deadline."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        for worker in self._workers:
            worker.stopping = True
        self._publish(Topic.STOP, b"")
        if self._running:
            await asyncio.wait(self._running, timeout=self.options.drain_timeout + STOP_SECONDS)
        for task in (*self._running, *self._loops):
            task.cancel()
        await asyncio.gather(*self._running, *self._loops, return_exceptions=True)
        await self._metrics_page.stop()
        await self.nodes.close()
        await self._registry_front.stop()
        self._until_end.close()
        log.info("ended")

    def parts(self) -> list[asyncio.Task[None]]:
        return [*self._running, *self._loops]

    async def _until_whole(self) -> None:
        """Wait until all workers serve. Raises ``StartupError``."""
        whole = asyncio.create_task(self._all_serve.wait())
        failed = asyncio.create_task(first_end(self.parts()))
        try:
            await asyncio.wait(
                (whole, failed), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if failed.done():
                failed.result()
            if not whole.done():
                raise StartupError(f"not all workers serve after {START_SECONDS:g} s")
        except BaseException:
            await self.stop()
            raise
        finally:
            for task in (whole, failed):
                task.cancel()
            await asyncio.gather(whole, failed, return_exceptions=True)

    def _is_whole(self) -> bool:
        return all(worker.serving for worker in self._workers)

    def _unready(self) -> str:
        if self._draining:
            return "draining"
        return self.registry.unready() if self._is_whole() else "not all workers serve"

    # -- messages ----------------------------------------------------------------------------

    def _link_to(self, worker: WorkerProcess) -> Link:
        def serving(body: bytes) -> None:
            worker.serving = True
            self._changed(worker)

        def loads(body: bytes) -> None:
            fields = json.loads(body)
            placed = unpack_loads(fields["nodes"])
            self._loads.take(worker.number, fields["active"], placed)
            self._share(set(placed), worker.number)

        async def usage(body: bytes) -> bytes:
            return await self._usage.get()

        async def overview(body: bytes) -> bytes:
            return b"[%b]" % b",".join(await self._gather(Topic.OVERVIEW, body))

        async def page(body: bytes) -> bytes:
            return await self._page.get()

        return Link(
            {
                Topic.SERVING: serving,
                Topic.LOADS: loads,
                Topic.DOUBT: self._doubt,
                Topic.SHUT_DOWN: lambda body: self._shut_down(),
            },
            {
                Topic.COMMAND: self._command,
                Topic.PAGE: page,
                Topic.USAGE: usage,
                Topic.OVERVIEW: overview,
                Topic.RESPONSE: partial(self._pass_on, Topic.RESPONSE),
                Topic.APPROVAL: partial(self._pass_on, Topic.APPROVAL),
                Topic.ITEMS: partial(self._pass_on, Topic.ITEMS),
            },
        )

    def _changed(self, worker: WorkerProcess) -> None:
        """A worker was started, serves, or has ended."""
        if worker.link is not None and not worker.serving:
            task = asyncio.create_task(self._introduce_all(worker.link))
            self._introducing.add(task)
            task.add_done_callback(self._introducing.discard)
        elif worker.link is None:
            self._connections.gone(worker.number)
            self._page.worker_ended(worker.number)
            self._usage.worker_ended(worker.number)
            self._share(set(self._loads.drop(worker.number)), worker.number)
        if self._is_whole():
            self._all_serve.set()
        self._publish(Topic.WHOLE, json.dumps(self._is_whole()).encode())

    async def _introduce_all(self, link: Link) -> None:
        """Tell a new worker of all nodes. Changes are told as usual meanwhile: those of a node that
        it does not know yet are part of what it is told later."""
        await link.opened.wait()
        for node in self.nodes:
            if not node.lost:
                for topic, body in introduce(node):
                    link.tell(topic, body)
                await link.drained()
        others = self._loads.sums(self._loads.keys())
        link.tell(Topic.OTHERS, _others(self._loads.active(), others))
        link.tell(Topic.WHOLE, json.dumps(self._is_whole()).encode())
        link.tell(Topic.ABSENT, self._absent())
        link.tell(Topic.SYNCED)
        if self._draining:
            link.tell(Topic.RETIRE)

    def _doubt(self, body: bytes) -> None:
        """A request of a worker did not reach a node."""
        node_id, epoch = json.loads(body)
        if (node := self.nodes.get(node_id, epoch)) is not None:
            self.registry.reachability.doubt(node)

    def _publish(self, topic: Topic, body: bytes) -> None:
        for worker in self._workers:
            if worker.link is not None:
                worker.link.tell(topic, body)

    def _share(self, keys: set[tuple[str, int]], source: int) -> None:
        """Tell all but one worker what the others have placed on some nodes."""
        for worker in self._workers:
            if worker.number != source and worker.link is not None:
                active = self._loads.active(without=worker.number)
                sums = self._loads.sums(keys, without=worker.number)
                worker.link.tell(Topic.OTHERS, _others(active, sums))
        for (node_id, epoch), placed in self._loads.sums(keys).items():
            if (node := self.nodes.get(node_id, epoch)) is not None:
                node.take_siblings(placed)

    async def _gather(self, topic: Topic, body: bytes = b"") -> list[bytes]:
        """The answers of all workers that answer soon."""
        return list((await self._gather_by_number(topic, body)).values())

    async def _gather_by_number(self, topic: Topic, body: bytes = b"") -> dict[int, bytes]:
        links = {w.number: w.link for w in self._workers if w.link is not None}
        asked = (link.ask(topic, body, GATHER_SECONDS) for link in links.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkClosedError):
                raise answer
        pairs = zip(links, answers, strict=True)
        return {number: answer for number, answer in pairs if isinstance(answer, bytes)}

    async def _command(self, body: bytes) -> bytes:
        """Run an operator's command; the answer says why it is refused, if it is."""
        fields: dict[str, Any] = json.loads(body)
        commands = self.registry.commands
        try:
            if "role" in fields:
                role: pb.Role = fields["role"]
                commands.set_role(fields["node"], role, force=fields["force"])
            else:
                commands.drain(fields["node"], fields["seconds"])
        except RequestError as error:
            unknown = isinstance(error, UnknownNodeError)
            return json.dumps({"refused": str(error), "unknown": unknown}).encode()
        return b"{}"

    async def _pass_on(self, topic: Topic, question: bytes) -> bytes:
        """What the worker answers whose number comes first in a question."""
        worker = self._workers[json.loads(question)[0]]
        if worker.link is None and topic is Topic.ITEMS:
            return NO_ITEMS
        try:
            if worker.link is None:
                raise LinkClosedError("The process that had this response has ended.")
            return await worker.link.ask(topic, question)
        except LinkClosedError as error:
            return refusal_of(error)

    def _absent(self) -> bytes:
        return pb.ListReply(absent=self.nodes.absent.all()).SerializeToString()

    async def _publish_absent(self) -> None:
        before: dict[str, tuple[str, bool]] = {}
        told_at = time.monotonic()
        while True:
            await asyncio.sleep(ABSENT_SECONDS)
            absent = self.nodes.absent.all()
            entries = {node.node_id: (node.reason, node.returned) for node in absent}
            now = time.monotonic()
            if entries != before or (entries and now - told_at >= ABSENT_AGAIN_SECONDS):
                before, told_at = entries, now
                self._publish(Topic.ABSENT, self._absent())


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of the sockets and files that workers share. Raises ``StartupError``."""
    if not hasattr(socket, "AF_UNIX"):
        raise StartupError("--router-workers above 1 needs a system with Unix sockets")
    try:
        folder = TemporaryDirectory(prefix="tandem-")
    except OSError as error:
        raise StartupError(
            f"--router-workers above 1 needs a folder for temporary files: {error.strerror}; set "
            f"TMPDIR to one"
        ) from None
    with folder as path:
        if len(path) > MAX_FOLDER:
            raise StartupError(
                f"{path} is too long for the sockets of --router-workers; set TMPDIR to a path of "
                f"at most {MAX_FOLDER} characters"
            )
        yield Path(path)


def _others(active: int, loads: Any) -> bytes:
    return json.dumps({"active": active, "nodes": pack_loads(loads)}).encode()
