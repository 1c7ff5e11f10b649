"""A worker: serves HTTP on its share of the port's connections, and follows its keeper's nodes."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace

from ...proto import tandem_pb2 as pb
from ...shared.errors import PeerRefusedError
from ...shared.security.credentials import Credentials
from ...shared.telemetry.logs import logger
from ...shared.telemetry.process_metrics import ProcessMetrics
from ...shared.telemetry.stats_line import log_rates
from ...shared.telemetry.tracing import Tracer
from ..app import App
from ..cluster.inflight import PlacedLoad
from ..cluster.node import Node
from ..cluster.node_table import NodeTable
from ..cluster.pinned_model import read_pinned
from ..cluster.registry_service import Registry
from ..options import RouterOptions
from ..telemetry.metrics import Metrics
from .fair_accept import ConnectionCounts, FairAccept
from .forwarding import Forwarding, open_door
from .http_front import HttpFront
from .merged_metrics import describe
from .merged_usage import describe_usage
from .node_messages import Loads, pack_loads, take_state, unpack_loads
from .process_link import Link, Topic
from .shared_approvals import SharedApprovals, take_answer
from .shared_responses import SharedResponses, describe_items, describe_response
from .siblings_link import LinkedSiblings
from .worker_process import WorkerPlace

log = logger("router")

# How often a worker tells what it has placed. A heartbeat tells as much, but once a second.
LOAD_SECONDS = 0.05
SYNC_SECONDS = 60.0
# Before a tokenizer is asked for again.
LEARN_PAUSES = (0.5, 2.0)
CLOSE_SECONDS = 0.5


class Worker:
    """Call ``start``, then ``stop``. Sets the event ``stop`` when the keeper wants its end, or is
    gone."""

    registry_port = 0
    metrics_port = 0

    def __init__(
        self,
        options: RouterOptions,
        place: WorkerPlace,
        stop: asyncio.Event,
        tracer: Tracer,
        credentials: Credentials,
    ) -> None:
        self.options = options = share_of(options)
        self.http_port = place.listener.getsockname()[1]
        self._place = place
        self._stop = stop
        self._sent: Loads = {}
        self._sent_active = 0
        self._synced = asyncio.Event()
        self._following: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self.nodes = NodeTable(options.node_timeout, credentials=credentials)
        self.nodes.on_doubt = self._doubt
        self.registry = Registry(options, self.nodes, place.started)
        self.metrics = Metrics(self.nodes)
        self.metrics.served = self.registry.served_name
        self._process = ProcessMetrics(self.metrics.registry, credentials)
        self._link = self._new_link()
        limits = place.folder / "limits"
        self.app = App(options, self.nodes, self.registry, self.metrics, tracer, limits)
        responses = self._join_services()
        forwarding = Forwarding(self.app, place.folder, responses.keeper_of)
        self._accept: FairAccept | None = None
        self._http = HttpFront(options, self.app, forwarding, warns=place.number == 0)

    def _new_link(self) -> Link:
        """The link to the keeper, with what each message does."""
        return Link(
            {
                Topic.JOIN: self._join,
                Topic.HEARTBEAT: self._heartbeat,
                Topic.STATE: lambda body: take_state(self.nodes, body),
                Topic.LOST: self._lose,
                Topic.ABSENT: self._take_absent,
                Topic.OTHERS: self._take_others,
                Topic.SYNCED: lambda body: self._synced.set(),
                Topic.WHOLE: self._take_whole,
                Topic.RETIRE: lambda body: self._retire(),
                Topic.STOP: lambda body: self._stop.set(),
            },
            {
                Topic.SERIES: self._series,
                Topic.USAGE: self._usage,
                Topic.OVERVIEW: self._overview,
                Topic.RESPONSE: self._response,
                Topic.APPROVAL: self._approval,
                Topic.ITEMS: lambda body: describe_items(self.app.services.responses, body),
            },
        )

    def _join_services(self) -> SharedResponses:
        """Replace the services that all workers share by those that ask the keeper."""
        options, place, services = self.options, self._place, self.app.services
        services.shut_down = lambda: self._link.tell(Topic.SHUT_DOWN)
        services.siblings = siblings = LinkedSiblings(
            self.registry.commands, self.metrics, services.usage.all, services.overview.share
        )
        siblings.link = self._link
        siblings.whole = False
        services.responses = responses = SharedResponses(options, place.number, self._link)
        services.approvals = SharedApprovals(options, place.number, self._link)
        return responses

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Follow the keeper, and serve once all of its nodes are known."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._loops.append(asyncio.create_task(self._follow()))
        self.registry.pin(await read_pinned(self.options))
        if (batches := await self.app.open_batches()) is not None:
            self._loops.append(asyncio.create_task(batches.run()))
        async with asyncio.timeout(SYNC_SECONDS):
            await self._synced.wait()
            if self._following:
                await asyncio.wait(self._following)  # tokenizers are being loaded
        self._loops += [
            asyncio.create_task(loop)
            for loop in (
                self._tell_loads(),
                self._close_lost(),
                self._process.watch(),
                log_rates(self.options.stats_interval, self.metrics.work, log),
            )
        ]
        place = self._place
        await self._http.start(open_door(place.folder, place.number))
        counts = ConnectionCounts(place.folder / "connections", self.options.router_workers)
        self._accept = FairAccept(
            place.listener, counts, place.number, self._connections, self._http.take
        )
        self._accept.start()
        self._link.tell(Topic.SERVING)

    async def retire(self) -> None:
        """Nothing: the keeper waits before it ends its workers."""

    async def stop(self) -> None:
        """Stop listening, let requests finish until the deadline, then abort them."""
        if self._accept is not None:
            self._accept.stop()
        await self._http.stop()
        for task in (*self._loops, *self._following):
            task.cancel()
        await asyncio.gather(*self._loops, *self._following, return_exceptions=True)
        if self.app.services.batches is not None:
            await self.app.services.batches.close()
        await self.nodes.close()
        self.app.close()

    def parts(self) -> list[asyncio.Task[None]]:
        assert self._http.serving is not None
        return [self._http.serving, *self._loops]

    async def _follow(self) -> None:
        """Follow the keeper. Without it the port has no owner: finish, and end."""
        await self._link.run(self._place.link)
        if not self._stop.is_set():
            log.error("the keeper of this worker is gone: ending with what runs")
            self._stop.set()
        await asyncio.Event().wait()

    def _connections(self) -> int:
        return len(self._http.connections) + len(self._http.taking)

    def _retire(self) -> None:
        self.app.services.draining = True

    # -- nodes -------------------------------------------------------------------------------

    def _join(self, body: bytes) -> None:
        request = pb.JoinRequest.FromString(body)
        self.nodes.join(request, request.address)
        if request.role == pb.ROLE_DECODE:
            task = asyncio.create_task(self._learn(request.model, request.address))
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def _learn(self, card: pb.ModelCard, address: str) -> None:
        """Have the tokenizer as the keeper has it; a call to the node may fail once."""
        for pause in (*LEARN_PAUSES, None):
            try:
                await self.registry.learn(card, address)
                return
            except PeerRefusedError as error:
                if pause is None:
                    log.error("%s", error)
                    return
            await asyncio.sleep(pause)

    def _heartbeat(self, body: bytes) -> None:
        self.nodes.heartbeat(pb.HeartbeatRequest.FromString(body))

    def _lose(self, body: bytes) -> None:
        node_id, epoch, keep = json.loads(body)
        self.nodes.lose(node_id, epoch, keep=keep)
        self._sent.pop((node_id, epoch), None)
        self.registry.nodes_lost()

    def _doubt(self, node: Node) -> None:
        """A request did not reach a node: the keeper finds out whether it can be called."""
        self._link.tell(Topic.DOUBT, json.dumps(node.key).encode())

    def _take_absent(self, body: bytes) -> None:
        self.nodes.absent.replace(pb.ListReply.FromString(body).absent)

    async def _close_lost(self) -> None:
        while True:
            await asyncio.sleep(CLOSE_SECONDS)
            await self.nodes.close_lost()

    # -- load --------------------------------------------------------------------------------

    async def _tell_loads(self) -> None:
        """Tell what this worker has placed on nodes, whenever it has changed."""
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            if self._accept is not None:
                self._accept.count()
            changed = {
                node.key: node.placed
                for node in self.nodes
                if node.placed != self._sent.get(node.key, PlacedLoad())
            }
            active = self.app.handler.active
            if changed or active != self._sent_active:
                self._sent |= changed
                self._sent_active = active
                fields = {"active": active, "nodes": pack_loads(changed)}
                self._link.tell(Topic.LOADS, json.dumps(fields).encode())

    def _take_others(self, body: bytes) -> None:
        fields = json.loads(body)
        self.app.handler.elsewhere = fields["active"]
        for (node_id, epoch), placed in unpack_loads(fields["nodes"]).items():
            if (node := self.nodes.get(node_id, epoch)) is not None:
                node.take_siblings(placed)

    def _take_whole(self, body: bytes) -> None:
        self.app.services.siblings.whole = json.loads(body)

    # -- answers -----------------------------------------------------------------------------

    async def _series(self, body: bytes) -> bytes:
        return await asyncio.to_thread(describe, self.metrics)

    async def _usage(self, body: bytes) -> bytes:
        return describe_usage(self.app.services.usage.all())

    async def _overview(self, body: bytes) -> bytes:
        return self.app.services.overview.share().model_dump_json().encode()

    async def _response(self, body: bytes) -> bytes:
        services = self.app.services
        return await describe_response(services.responses, services.runs, body)

    async def _approval(self, body: bytes) -> bytes:
        return await take_answer(self.app.services.approvals, body)


def share_of(options: RouterOptions) -> RouterOptions:
    """The options of one of several workers: its part of what all may hold together."""
    count = options.router_workers

    def part(whole: int, least: int = 1) -> int:
        return max(least, -(-whole // count))

    return replace(
        options,
        max_connections=part(options.max_connections),
        max_held_body_bytes=part(options.max_held_body_bytes, options.max_body_bytes),
        max_held_prompt_tokens=part(options.max_held_prompt_tokens, 1024),
        max_held_answer_bytes=part(options.max_held_answer_bytes, options.max_answer_bytes),
        max_stored_responses=part(options.max_stored_responses, 0),
    )
