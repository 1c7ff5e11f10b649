"""One node as the router sees it: identity, reported load, prefixes, connection, drain state.

A node is one start of a process, (id, epoch). When an id joins with a new epoch, the old node is
lost and its requests end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from ...proto import tandem_pb2 as pb
from ...shared.security.credentials import INSECURE, Credentials
from ...shared.telemetry.logs import logger
from ...shared.telemetry.tracing import Metadata
from ..node_streams.connection import NodeConnection
from ..node_streams.remote_request import RemoteRequest
from ..placement.node_prefixes import NodePrefixes, PromptKeys
from ..placement.place import NodeView
from .ejection import Ejection
from .inflight import InflightLoad, InflightPrompt
from .reported_load import MAX_LINKS, clamp_load

log = logger("router")

M = TypeVar("M", pb.Load, pb.ModelCard)

# Keys of a prompt that are expected on its node until the node reports them.
MAX_EXPECTED_KEYS = 512


class Node:
    """One start of a node. ``lost`` is final."""

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
        # A copy, because part of a message keeps the whole message in memory.
        self.model = _copy(request.model)
        self.group = sys.intern(request.model.fingerprint)
        self.version = request.version
        self.load = pb.Load()
        self.rate = 0.0  # prefill tokens per second; 0 until measured
        self.sequences = 0  # running or waiting on the node, as far as known
        self._other_sequences = 0  # from other routers, by the last report
        self._link_rates: dict[str, float] = {}
        self.prefixes = NodePrefixes()
        self.inflight_load = InflightLoad()
        self.ejection = Ejection(clock)
        self._connection = NodeConnection(address, credentials)
        self.last_seen = now
        self.draining = False
        self.left = False
        self.lost = False
        self.unreachable = ""  # the reason why this router cannot reach it
        self.to_drain = False  # by an operator's command
        self.drain_seconds: float | None = None  # the operator's limit for what runs
        self.next_role: pb.Role = pb.ROLE_UNSPECIFIED  # by an operator's command

    # -- state -------------------------------------------------------------------------------

    @property
    def inflight_requests(self) -> int:
        """The number of this router's requests on the node."""
        return self._connection.requests

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the node has yet to compute, as far as is known now. A decode node
        without sequences has none: a report that says otherwise is older than their end."""
        load = self.inflight_load
        return load.queued_tokens if self.is_prefill or self.sequences else load.compute_tokens

    def has_room(self, tokens: int) -> bool:
        """True if ``tokens`` fit, or if the room is unknown."""
        room = self.inflight_load.room_tokens
        return room is None or room >= tokens

    def holds(self, key: int) -> bool:
        """True if it holds, or is expected to hold, the prefix with this key."""
        has_key = key in self.prefixes.keys or self.inflight_load.expects(key)
        return has_key and not self.lost

    @property
    def ejected(self) -> bool:
        """True if requests should preferably go elsewhere."""
        return bool(self.unreachable) or (self.ejection.doubtful and self.ejection.ejected)

    @property
    def state(self) -> str:
        """Its state in one word, for operators."""
        if self.draining:
            return "draining"
        return "unreachable" if self.unreachable else "ready"

    @property
    def is_withdrawn(self) -> bool:
        """True if an operator has taken it out of service."""
        return self.to_drain or self.next_role != pb.ROLE_UNSPECIFIED

    @property
    def finished(self) -> bool:
        """True if its silence is not a loss: it has left, or it is draining and no request would be
        lost with it."""
        # A node that changes its role is expected back.
        ends = self.draining and self.next_role == pb.ROLE_UNSPECIFIED
        # Decode nodes work without a prefill node, and one of --pd-url never announces that it
        # leaves.
        return self.left or (ends and (self.is_prefill or not self._serves))

    @property
    def _serves(self) -> bool:
        """True if it may run a request, of this router or by its last report."""
        load = self.load
        return bool(self.inflight_requests or load.running or load.waiting or load.transfers)

    def info(self, now: float) -> pb.NodeInfo:
        """The node as operators see it."""
        return pb.NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            draining=self.draining,
            load=self.load,
            requests=self.inflight_requests,
            heartbeat_age_seconds=now - self.last_seen,
            version=self.version,
            next_role=self.next_role,
            unreachable=self.unreachable,
        )

    def view(self, prompt: PromptKeys) -> NodeView:
        """The node as placement of this prompt sees it."""
        return NodeView(
            node_id=self.node_id,
            epoch=self.epoch,
            address=self.address,
            prefill=self.is_prefill,
            group=self.group,
            draining=self.draining,
            ejected=self.ejected,
            sequences=self.sequences,
            queued_prefill_tokens=self.queued_tokens,
            prefill_tokens_per_second=self.rate,
            held_tokens=self.prefixes.matched(prompt, self.inflight_load.expects),
            room_tokens=self.inflight_load.room_tokens,
            link_rates=self._link_rates,
        )

    def inflight_prompt(self, prompt: PromptKeys, compute_tokens: int) -> InflightPrompt:
        """The ``inflight_load`` entry of a prompt that is placed here."""
        sample = islice(self.prefixes.sample(prompt), MAX_EXPECTED_KEYS)
        keys = tuple(key for _, key in sample)
        self.prefixes.expect(keys)
        return InflightPrompt(compute_tokens, len(prompt.tokens), keys)

    # -- changes -----------------------------------------------------------------------------

    def report(self, load: pb.Load, prefixes: pb.Prefixes) -> None:
        """Apply the report of a join or a heartbeat."""
        clamp_load(load)
        self._update_links(load)
        self.load = _copy(load)
        self.rate = load.prefill_tokens_per_second
        has_blocks = load.total_blocks and load.block_size
        room = load.free_blocks * load.block_size if has_blocks else None
        # The report was written slightly earlier, and may include requests that have ended.
        peak = self._connection.take_peak()
        self._other_sequences = max(0, load.running + load.waiting - peak)
        self._count_sequences()
        self.inflight_load.apply_report(load.queued_prefill_tokens, room)
        self.prefixes.update(prefixes)

    def _count_sequences(self) -> None:
        self.sequences = self._connection.sequences + self._other_sequences

    def _update_links(self, load: pb.Load) -> None:
        """Move the changed link rates out of a report; a rate of 0 removes a link."""
        for link in load.link_rates:
            self._link_rates.pop(link.node_id, None)
            if link.tokens_per_second:
                self._link_rates[link.node_id] = link.tokens_per_second
        load.ClearField("link_rates")
        while len(self._link_rates) > MAX_LINKS:
            del self._link_rates[next(iter(self._link_rates))]

    def drain(self, seconds: float | None = None) -> None:
        """Place nothing more here, and let the reply to the next heartbeat tell the node to drain.
        Running requests have ``seconds``, or unlimited time."""
        log.info("node %s is to drain", self.node_id)
        self.to_drain = self.draining = True
        self.drain_seconds = seconds

    def switch(self, role: pb.Role) -> None:
        """Drain the node until it rejoins with this role."""
        log.info("node %s is to change its role", self.node_id)
        self.next_role, self.draining = role, True

    def set_unreachable(self, problem: str) -> None:
        """Set the reason why the node cannot be reached; empty if it can."""
        if self.unreachable and not problem:
            self.ejection.on_reachable()
        self.unreachable = problem

    def lose(self) -> None:
        """Mark the process as gone, and cancel its requests."""
        self.lost = True
        self._connection.cancel()

    # -- requests -------------------------------------------------------------------------------

    def generate(self, request: pb.GenerateRequest, metadata: Metadata) -> RemoteRequest:
        """Start a request; ``end`` must follow."""
        remote = self._connection.generate(request, metadata)
        self._count_sequences()
        self.ejection.on_sent(remote, compiles=request.sampling.HasField("structured_outputs"))
        return remote

    def end(self, remote: RemoteRequest) -> None:
        """End a request, finished or not."""
        self._connection.end(remote)
        self._count_sequences()
        self.ejection.on_end(remote)

    async def reconnect(self, remote: RemoteRequest) -> bool:
        """Replace the connection that a request has lost. False if the node is not reached soon."""
        return await self._connection.reconnect(remote)

    def end_choice(self, internal_id: int, index: int) -> None:
        """End one choice of a request on the node."""
        self._connection.end_choice(internal_id, index)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()


def _copy(message: M) -> M:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
