"""The nodes that this router knows: who is there, how busy, and the calls that run on each.

Owns the connections. A node is one start of a process, (id, epoch): when the same id joins with a
new epoch, the old one is lost, and with it the calls that it held.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import grpc
from prometheus_client import Counter

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ...proto.tandem_pb2_grpc import DecodeStub
from ...shared.security.credentials import INSECURE, Credentials
from ...shared.telemetry.logs import logger
from ...shared.telemetry.tracing import Metadata
from ..placement.node_prefixes import NodePrefixes, PromptKeys
from ..placement.place import NodeView
from ..placement.prefix_table import PrefixTable
from .absent import Absent
from .ejection import Ejection
from .inflight import InflightLoad, Placed
from .reported_load import bound
from .shortlist import FEW, Excluded, shortlist

log = logger("router")

M = TypeVar("M", pb.Load, pb.ModelCard)

# Links of a decode node that are remembered; the oldest are forgotten first.
MAX_LINKS = 4096
# How long the prefixes of a node that fell silent are kept for its return.
KEPT_SECONDS = 300.0
# When as many nodes fall silent at once, and such a part of all, it is hardly the nodes. They are
# lost after so many times the usual patience; calls to nodes that are gone fail sooner anyway.
MANY_SILENT = 16
PART_SILENT = 0.2
PATIENCE = 3.0
MAX_KEPT = 1024
# Keys of a prompt that are expected where it was placed, until the node tells what it holds.
MAX_EXPECTED_KEYS = 512

END_CHOICE_SECONDS = 5.0
# How long a node may take to say that it is still there.
STATUS_SECONDS = 1.0

CHANNEL_OPTIONS = (
    # A node may send heartbeats and yet be cut off from us: its calls must fail within 3 s.
    # gRPC waits a minute for the answer to a ping, whatever keepalive_timeout_ms says.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # A node that restarts on its address is a new node here; it must not wait for a backoff.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Node:
    """One start of one node. ``lost`` is final."""

    def __init__(
        self,
        request: pb.JoinRequest,
        address: str,
        now: float,
        credentials: Credentials = INSECURE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node_id = request.node_id
        self.epoch = request.epoch
        self.role = request.role
        self.is_prefill = request.role == pb.ROLE_PREFILL
        self.key = request.node_id, request.epoch
        self.address = address
        # A copy: a part of a message keeps all of it in memory.
        self.model = _copied(request.model)
        self.group = sys.intern(request.model.fingerprint)
        self.load = pb.Load()
        self.rate = 0.0  # of prefill, in tokens a second; 0 until measured
        self._room: int | None = None  # tokens that its free blocks take, if it has said so
        self.version = request.version
        self.prefixes = NodePrefixes()
        self.ledger = InflightLoad()
        self.ejection = Ejection(clock)
        self._link_rates: dict[str, float] = {}
        self.draining = False
        self.left = False
        self.to_drain = False  # an operator asked for it
        self.drain_seconds: float | None = None  # and gave what runs this long
        self.next_role: pb.Role = pb.ROLE_UNSPECIFIED  # likewise
        self.lost = False
        self.last_seen = now
        self.inflight = 0
        self._sequences = 0  # of this router's calls
        self._other_sequences = 0  # of others', by the last report
        self._most_sequences = 0  # of this router's calls, at any time since the last report
        self._calls: dict[Any, int] = {}  # with the sequences of each
        self._telling: set[Any] = set()
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._generation = 0  # of the credentials, when the channel was opened

    @property
    def sequences(self) -> int:
        """Running or waiting there, as far as is known now."""
        return self._sequences + self._other_sequences

    @property
    def room_tokens(self) -> int | None:
        """What its free blocks take, less what was placed there since; ``None``: unknown."""
        return None if self._room is None else self._room - self.ledger.room_tokens

    def has_room(self, tokens: int) -> bool:
        return self._room is None or self._room - self.ledger.room_tokens >= tokens

    def info(self, now: float) -> pb.NodeInfo:
        """What an operator may see."""
        return pb.NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            draining=self.draining,
            load=self.load,
            requests=self.inflight,
            heartbeat_age_seconds=now - self.last_seen,
            version=self.version,
            next_role=self.next_role,
        )

    def report(self, load: pb.Load, prefixes: pb.Prefixes) -> None:
        """What the node says of itself, now and then."""
        bound(load)
        self._learn_links(load)
        self.load = _copied(load)
        self.rate = load.prefill_tokens_per_second
        known = load.total_blocks and load.block_size
        self._room = load.free_blocks * load.block_size if known else None
        # It was written a little before it came, perhaps about calls that have ended since.
        self._other_sequences = max(0, load.running + load.waiting - self._most_sequences)
        self._most_sequences = self._sequences
        self.ledger.reported(load.queued_prefill_tokens)
        self.prefixes.update(prefixes)

    def _learn_links(self, load: pb.Load) -> None:
        """Take the rates that have changed out of a report; 0 stands for one that has gone."""
        for link in load.link_rates:
            self._link_rates.pop(link.node_id, None)
            if link.tokens_per_second:
                self._link_rates[link.node_id] = link.tokens_per_second
        load.ClearField("link_rates")
        while len(self._link_rates) > MAX_LINKS:
            del self._link_rates[next(iter(self._link_rates))]

    def view(self, prompt: PromptKeys) -> NodeView:
        """What placement of this prompt may know."""
        return NodeView(
            node_id=self.node_id,
            epoch=self.epoch,
            address=self.address,
            prefill=self.is_prefill,
            group=self.group,
            draining=self.draining,
            ejected=self.ejection.ejected,
            sequences=self.sequences,
            queued_prefill_tokens=self.ledger.queued_tokens,
            prefill_tokens_per_second=self.rate,
            held_tokens=self.prefixes.matched(prompt, self.ledger.expects),
            room_tokens=self.room_tokens,
            link_rates=self._link_rates,
        )

    def placed(self, prompt: PromptKeys, compute_tokens: int) -> Placed:
        """What the ledger is to remember of a prompt that is placed here."""
        sample = islice(self.prefixes.sample(prompt), MAX_EXPECTED_KEYS)
        keys = tuple(key for _, key in sample)
        self.prefixes.expect(keys)
        return Placed(compute_tokens, len(prompt.tokens), keys)

    async def answers(self) -> bool:
        """Whether this start of the node may still live: it says so, or nobody says otherwise."""
        try:
            status = await self._stub().Status(pb.StatusRequest(), timeout=STATUS_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return bool(status.epoch == self.epoch)

    def _stub(self) -> Any:
        if self._channel is None or self._generation != self._credentials.generation:
            # A channel opened with older credentials is closed when its last call ends.
            self._generation = self._credentials.generation
            self._channel = self._credentials.channel(self.address, CHANNEL_OPTIONS)
        return self._credentials.stub(DecodeStub, self._channel)

    def generate(self, request: pb.GenerateRequest, timeout: float, metadata: Metadata) -> Any:
        """Start a call; give it back with ``done``."""
        call = self._stub().Generate(request, timeout=timeout, metadata=metadata)
        self.ejection.asked(call)
        self._calls[call] = max(1, request.sampling.n)
        self._sequences += self._calls[call]
        self._most_sequences = max(self._most_sequences, self._sequences)
        self.inflight += 1
        return call

    def end_choice(self, call_id: int, index: int) -> None:
        """Tell the node that one choice of a call has ended. It may be too late, or the node too
        old to know; then it ends with the call, so nobody waits for the answer."""
        if self._channel is not None:
            stub = self._credentials.stub(DecodeStub, self._channel)
            request = pb.EndChoiceRequest(call_id=call_id, index=index)
            told = stub.EndChoice(request, timeout=END_CHOICE_SECONDS)
            self._telling.add(told)  # gRPC cancels what nobody holds
            told.add_done_callback(self._telling.discard)

    def done(self, call: Any) -> None:
        """The call is over, or is to be: cancelling one that has ended does nothing."""
        call.cancel()
        self.ejection.ended(call)
        self._sequences -= self._calls.pop(call)
        self.inflight -= 1

    def drain(self, seconds: float | None = None) -> None:
        """From now on it gets no work, and its next heartbeat tells it so. What runs there has
        ``seconds``, or as long as it takes."""
        log.info("node %s is to drain", self.node_id)
        self.to_drain = self.draining = True
        self.drain_seconds = seconds

    def switch(self, role: pb.Role) -> None:
        """The same, until it joins again in this role."""
        log.info("node %s is to change its role", self.node_id)
        self.next_role, self.draining = role, True

    @property
    def taken_out(self) -> bool:
        """An operator wants no more work on it."""
        return self.to_drain or self.next_role != pb.ROLE_UNSPECIFIED

    def lose(self) -> None:
        """The process is gone: whoever waits for it must hear at once."""
        self.lost = True
        for call in tuple(self._calls):
            call.cancel()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)


class NodeTable:
    """All nodes by id. Time comes from ``clock``, so that tests need not wait."""

    def __init__(
        self,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        credentials: Credentials = INSECURE,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._credentials = credentials
        self._nodes: dict[str, Node] = {}
        self.absent = Absent(clock)
        self._many_silent = False
        self._kinds: dict[tuple[bool, str], list[Node]] = {}
        self._holders: PrefixTable[Node] = PrefixTable()
        self.ejections = Counter(
            "tandem_decode_nodes_ejected",
            "Times that a decode node was left alone because it could not be reached, by reason.",
            ["reason"],
            registry=None,
        )
        self._lost: list[Node] = []
        # Prefixes of lost nodes by (id, epoch), and until when they are kept.
        self._kept: dict[tuple[str, int], tuple[float, NodePrefixes]] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def __getitem__(self, node_id: str) -> Node:
        """A node of the last snapshot: nothing changes the table between the two."""
        return self._nodes[node_id]

    def get(self, node_id: str, epoch: int) -> Node | None:
        """The node, if it is still this start of it."""
        node = self._nodes.get(node_id)
        return node if node is not None and node.epoch == epoch else None

    def join(self, request: pb.JoinRequest, address: str) -> Node:
        """A node announces itself; joining again with the same epoch keeps its calls."""
        node = self.get(request.node_id, request.epoch)
        if node is not None and node.address == address and node.role == request.role:
            node.report(request.load, request.prefixes)
            node.last_seen = self._clock()
            node.left = False
            node.draining = node.taken_out
            return node
        before = self._nodes.get(request.node_id)
        if before is not None and before.epoch != request.epoch and not before.draining:
            self.absent.lost.labels(role_name(before.role)).inc()
            self._remove(request.node_id, "died, and has been started again", logging.WARNING)
        why = "was replaced by a new start, or role, of it"
        self._remove(request.node_id, why, keep=node is not None)
        node = Node(request, address, self._clock(), self._credentials, self._clock)
        self._nodes[request.node_id] = node
        if node.key in self._kept:
            _, node.prefixes = self._kept.pop(node.key)
            node.prefixes.hand_to(node)
        else:
            node.prefixes.show_in(self._holders.column(node))
        self._kinds.setdefault((node.is_prefill, node.group), []).append(node)
        node.report(request.load, request.prefixes)
        log.info("%s node %s joined from %s", role_name(node.role), node.node_id, address)
        self.absent.came(node.node_id)
        return node

    def prefix_version(self, node_id: str, epoch: int) -> int:
        """What is known here of the prefixes of this start of a node; 0: nothing."""
        node = self.get(node_id, epoch)
        return node.prefixes.version if node is not None else 0

    def unreachable(self, node: Node, call: Any, reason: str) -> None:
        """A call to the node failed on the way, or was not answered."""
        pause = node.ejection.failed(call)
        if pause:
            self.ejections.labels(reason).inc()
            log.warning(
                "node %s gets requests last for %g s, although its heartbeats come: %s",
                node.node_id,
                pause,
                reason,
            )

    def named(self, node_id: str) -> Node | None:
        """The node of this name, whichever start of it."""
        return self._nodes.get(node_id)

    def serves(self, group: str) -> bool:
        """Whether a node of this version is there, of either kind."""
        return any((prefill, group) in self._kinds for prefill in (False, True))

    def heartbeat(self, request: pb.HeartbeatRequest) -> Node | None:
        """The node, or ``None`` when it is not known (any more)."""
        node = self.get(request.node_id, request.epoch)
        if node is None:
            return None
        node.last_seen = self._clock()
        node.report(request.load, request.prefixes)
        node.draining = request.draining or node.left or node.taken_out
        return node

    def leave(self, node_id: str, epoch: int) -> None:
        """It finishes what it has, and gets no more."""
        node = self.get(node_id, epoch)
        if node is not None:
            log.info("node %s is leaving", node_id)
            node.draining = node.left = True

    def expire(self, held_up: float = 0.0) -> None:
        """Lose the nodes whose heartbeats have stopped.

        ``held_up`` is how many seconds the router itself just stood still. What came meanwhile is
        unread, however long it takes to read it: this time never counts as a node's silence.
        """
        now = self._clock()
        for node in self._nodes.values():
            node.last_seen = min(now, node.last_seen + held_up)
        for key in [key for key, (until, _) in self._kept.items() if until < now]:
            self._forget(key)
        patience = self._patience(now)
        for node in self._silent(now - patience):
            gone = "has left" if node.draining else f"was silent for {patience:g} s"
            level = logging.INFO if node.draining else logging.WARNING
            self._remove(node.node_id, gone, level, keep=not node.draining)
            if not node.draining:
                self.absent.add(
                    pb.AbsentNode(
                        node_id=node.node_id, role=node.role, address=node.address, reason=gone
                    )
                )

    def _patience(self, now: float) -> float:
        """How many seconds of silence lose a node now."""
        count = len(self._silent(now - self._timeout))
        many = count >= MANY_SILENT and count > PART_SILENT * len(self._nodes)
        patience = self._timeout * (PATIENCE if many else 1.0)
        if many and not self._many_silent:
            log.warning(
                "%d of %d nodes are silent at once: their heartbeats may be held up here or on the "
                "way, so they are waited for %g s",
                count,
                len(self._nodes),
                patience,
            )
        self._many_silent = many
        return patience

    def _silent(self, horizon: float) -> list[Node]:
        return [
            node
            for node in self._nodes.values()
            # One that has left owes no heartbeats while it finishes; gRPC's own pings watch it.
            if node.last_seen < horizon and not (node.left and node.inflight)
        ]

    def now(self) -> float:
        """The time that ``last_seen`` is measured by."""
        return self._clock()

    def infos(self) -> list[pb.NodeInfo]:
        """All nodes, prefill nodes first, by name."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.role, node.node_id))
        return [node.info(self._clock()) for node in nodes]

    def decode_ready(self) -> bool:
        return any(n.role == pb.ROLE_DECODE and not n.draining for n in self._nodes.values())

    def views(
        self,
        prompt: PromptKeys,
        turn: int = 0,
        exclude: Excluded = frozenset(),
        *,
        every: bool = False,
    ) -> list[NodeView]:
        """The nodes that may be best for a prompt: ``every`` one, or a few of very many."""
        if every or len(self._nodes) <= FEW:
            return [node.view(prompt) for node in self._nodes.values()]
        few = shortlist(self._kinds.values(), self._holders, prompt, turn, exclude)
        return [node.view(prompt) for node in few]

    def take_turn(self) -> int:
        """How many prompts were placed before."""
        self._turns += 1
        return self._turns - 1

    async def close_lost(self) -> None:
        """Close the connections of lost nodes, after their calls were cancelled."""
        lost, self._lost = self._lost, []
        for node in lost:
            await node.close()

    async def close(self) -> None:
        for node_id in tuple(self._nodes):
            self._remove(node_id, "was dropped: the router stops")
        await self.close_lost()

    def _remove(
        self, node_id: str, why: str, level: int = logging.INFO, *, keep: bool = False
    ) -> None:
        """``keep`` its prefixes: the same start of it may come back."""
        node = self._nodes.pop(node_id, None)
        if node is not None:
            log.log(level, "%s node %s %s", role_name(node.role), node_id, why)
            node.lose()
            kind = self._kinds[node.is_prefill, node.group]
            kind.remove(node)
            if not kind:
                del self._kinds[node.is_prefill, node.group]
            self._lost.append(node)
            if keep:
                self._kept[node.key] = self._clock() + KEPT_SECONDS, node.prefixes
            else:
                node.prefixes.hide()
            if len(self._kept) > MAX_KEPT:
                self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, int]) -> None:
        _, prefixes = self._kept.pop(key)
        prefixes.hide()


def _copied(message: M) -> M:
    made = type(message)()
    made.CopyFrom(message)
    return made
