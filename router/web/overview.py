"""The data of the cluster page: a limited number of nodes, busiest first, the sums of all others,
and the prompts whose KV moves between nodes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from pydantic import BaseModel

from ...proto.roles import role_name
from ...shared.telemetry.stats_line import Work
from ..cluster.node import Node
from ..cluster.node_table import NodeTable
from ..placement.recent_prefills import Prefill, RecentPrefills

# Nodes of each role on the page.
MAX_SHOWN = 16
MAX_ABSENT_SHOWN = 16
MAX_PREFILLS = 64
# How long all clients get the same overview.
REUSE_SECONDS = 0.2
# A node is late when it has missed this many heartbeats.
MISSED_BEATS = 2.5


class NodeState(BaseModel):
    """A node by its last heartbeat. ``kv_used`` is the share of its KV blocks that requests hold,
    ``kv_cached`` the share that only its prefix index holds."""

    node_id: str
    role: str
    state: str
    running: int
    waiting: int
    queued_prefill_tokens: int
    prefill_tokens_per_second: float
    kv_tokens: int
    kv_used: float
    kv_cached: float
    transfers: int
    leases: int
    requests: int
    heartbeat_age_seconds: float
    version: str


class OtherNodes(BaseModel):
    """Sums over the nodes of a role that are not listed."""

    role: str
    nodes: int
    states: dict[str, int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    kv_used: float


class MissingNode(BaseModel):
    """A node that is lost or was refused. ``returned``: it has joined again after a restart."""

    node_id: str
    role: str
    state: str
    reason: str
    seconds_ago: float
    returned: bool


class PrefillEntry(BaseModel):
    """One prompt that a prefill node computes, or has computed, for a decode node. ``seconds`` is
    the duration so far; ``ended_seconds_ago`` is null until the end."""

    number: int
    prefill_node: str
    decode_node: str
    tokens: int
    moved_tokens: int
    seconds: float
    ended_seconds_ago: float | None
    failed: bool
    phases: dict[str, float]


class PrefillTotals(BaseModel):
    """Prompts since the router started: computed on prefill nodes, or on decode nodes."""

    moved: int
    moved_tokens: int
    local: int


class ClusterOverview(BaseModel):
    """The state of the cluster as this router sees it."""

    prefills: list[PrefillEntry]
    prefills_left_out: int
    totals: PrefillTotals
    prompt_tokens: int
    generated_tokens: int
    nodes: list[NodeState]
    others: list[OtherNodes]
    missing: list[MissingNode]
    missing_left_out: int
    requests: int


class Overview:
    """Computes ``ClusterOverview``s. ``beat`` is the period of heartbeats in seconds; ``work`` and
    ``requests`` return sums over all requests of the router."""

    def __init__(
        self,
        nodes: NodeTable,
        beat: float,
        work: Callable[[], Work],
        requests: Callable[[], int],
    ) -> None:
        self._nodes = nodes
        self._beat = beat
        self._work = work
        self._requests = requests
        self._last_time = 0.0
        self._last: ClusterOverview | None = None

    def now(self) -> ClusterOverview:
        """The current state, at most ``REUSE_SECONDS`` old."""
        if self._last is None or self._nodes.now() - self._last_time >= REUSE_SECONDS:
            self._last = self._new()
            self._last_time = self._nodes.now()
        return self._last

    def _new(self) -> ClusterOverview:
        prefills, work = self._nodes.prefills, self._work()
        entries, left_out = prefill_entries(prefills)
        listed, others = node_states(self._nodes, self._beat, entries)
        missing, missing_left_out = missing_nodes(self._nodes)
        return ClusterOverview(
            prefills=entries,
            prefills_left_out=left_out,
            totals=PrefillTotals(
                moved=prefills.prompts_moved,
                moved_tokens=prefills.tokens_moved,
                local=prefills.prompts_local,
            ),
            prompt_tokens=int(work.prompt_tokens),
            generated_tokens=int(work.generated_tokens),
            nodes=listed,
            others=others,
            missing=missing,
            missing_left_out=missing_left_out,
            requests=self._requests(),
        )


def node_states(
    nodes: NodeTable, beat: float, prefills: Sequence[PrefillEntry]
) -> tuple[list[NodeState], list[OtherNodes]]:
    """The nodes to list, prefill nodes first, and the sums over the others by role. ``beat`` is the
    period of heartbeats in seconds."""
    now, busy = nodes.now(), _busy(prefills)
    listed: list[NodeState] = []
    others: list[OtherNodes] = []
    for prefill in (True, False):
        candidates = [node for node in nodes if node.is_prefill is prefill]
        busiest = candidates
        if len(candidates) > MAX_SHOWN:
            busiest = heapq.nlargest(MAX_SHOWN, candidates, key=lambda node: _interest(node, busy))
            others.append(_sum(set(candidates).difference(busiest), now, beat))
        listed += [_node_state(node, now, beat) for node in sorted(busiest, key=_by_name)]
    return listed, others


def missing_nodes(nodes: NodeTable) -> tuple[list[MissingNode], int]:
    """The nodes that became absent last, and the number of other absent ones."""
    absent = nodes.absent.all()
    latest = [
        MissingNode(
            node_id=node.node_id,
            role=role_name(node.role),
            state="refused" if node.refused else "lost",
            reason=node.reason,
            seconds_ago=round(node.seconds_ago, 1),
            returned=node.returned,
        )
        for node in reversed(absent[-MAX_ABSENT_SHOWN:])
    ]
    return latest, len(absent) - len(latest)


def prefill_entries(prefills: RecentPrefills) -> tuple[list[PrefillEntry], int]:
    """Running prefills, then recent ones, and the number of running ones that are left out."""
    now, running = prefills.now(), list(prefills.running())
    listed = running[:MAX_PREFILLS]
    room = MAX_PREFILLS - len(listed)
    recent = list(islice(reversed(prefills.recent()), room))
    return [_prefill_entry(each, now) for each in (*listed, *recent)], len(running) - len(listed)


def _busy(prefills: Sequence[PrefillEntry]) -> Counter[str]:
    """The number of prompts that move from or to each node."""
    running = (each for each in prefills if each.ended_seconds_ago is None)
    return Counter(name for each in running for name in (each.prefill_node, each.decode_node))


def _interest(node: Node, busy: Counter[str]) -> tuple[int, bool, int]:
    load = node.load
    return busy[node.node_id], node.ejected or node.draining, load.running + load.waiting


def _by_name(node: Node) -> tuple[int, str]:
    """Sort key that puts decode-2 before decode-10."""
    return len(node.node_id), node.node_id


def _state(node: Node, now: float, beat: float) -> str:
    if node.draining:
        return "draining"
    if node.ejected:
        return "unreachable"
    return "late" if now - node.last_seen > MISSED_BEATS * beat else "ready"


def _kv_used(node: Node) -> float:
    load = node.load
    used_blocks = load.owned_blocks + load.reserved_blocks
    return min(1.0, used_blocks / load.total_blocks) if load.total_blocks else 0.0


def _node_state(node: Node, now: float, beat: float) -> NodeState:
    load = node.load
    return NodeState(
        node_id=node.node_id,
        role=role_name(node.role),
        state=_state(node, now, beat),
        running=load.running,
        waiting=load.waiting,
        queued_prefill_tokens=max(load.queued_prefill_tokens, node.inflight_load.queued_tokens),
        prefill_tokens_per_second=round(node.rate, 1),
        kv_tokens=load.total_blocks * load.block_size,
        kv_used=round(_kv_used(node), 4),
        kv_cached=round(load.cached_blocks / load.total_blocks, 4) if load.total_blocks else 0.0,
        transfers=load.transfers,
        leases=load.leases,
        requests=node.inflight_requests,
        heartbeat_age_seconds=round(now - node.last_seen, 2),
        version=node.version,
    )


def _sum(nodes: Iterable[Node], now: float, beat: float) -> OtherNodes:
    others = list(nodes)
    return OtherNodes(
        role=role_name(others[0].role),
        nodes=len(others),
        states=dict(Counter(_state(node, now, beat) for node in others)),
        running=sum(node.load.running for node in others),
        waiting=sum(node.load.waiting for node in others),
        queued_prefill_tokens=sum(node.load.queued_prefill_tokens for node in others),
        kv_used=round(sum(map(_kv_used, others)) / len(others), 4),
    )


def _prefill_entry(each: Prefill, now: float) -> PrefillEntry:
    phases = each.first_token.ListFields() if each.first_token is not None else ()
    return PrefillEntry(
        number=each.number,
        prefill_node=each.prefill_node,
        decode_node=each.decode_node,
        tokens=each.tokens,
        moved_tokens=each.moved_tokens,
        seconds=round((now if each.end is None else each.end) - each.start, 3),
        ended_seconds_ago=None if each.end is None else round(now - each.end, 3),
        failed=each.failed,
        phases={field.name.removesuffix("_seconds"): round(value, 4) for field, value in phases},
    )
