"""One node as the router knows it: identity, reported load, prefixes, connection, drain state.

A node is one start of a process, (id, epoch): when the same id joins with a new epoch, the old node
is lost, and its requests end.
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
from .reported_load import clamp_load

log = logger("router")

M = TypeVar("M", pb.Load, pb.ModelCard)

# Links of a decode node that are remembered; the oldest are forgotten first.
MAX_LINKS = 4096
# Keys of a prompt that are expected where it was placed, until the node reports what it holds.
MAX_EXPECTED_KEYS = 512


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
        self.version = request.version
        self.load = pb.Load()
        self.rate = 0.0  # of prefill, in tokens a second; 0 until measured
        self.sequences = 0  # running or waiting on the node, as far as is known now
        self._other_sequences = 0  # of other routers' requests, by the last report
        self._link_rates: dict[str, float] = {}
        self.prefixes = NodePrefixes()
        self.inflight_load = InflightLoad()
        self.ejection = Ejection(clock)
        self._connection = NodeConnection(address, credentials)
        self.last_seen = now
        self.draining = False
        self.left = False
        self.lost = False
        self.unreachable = ""  # why this router cannot reach it
        self.to_drain = False  # by an operator's command
        self.drain_seconds: float | None = None  # the operator's limit for what runs
        self.next_role: pb.Role = pb.ROLE_UNSPECIFIED  # by an operator's command

    # -- state -------------------------------------------------------------------------------

    @property
    def inflight_requests(self) -> int:
        """This router's requests that run on the node."""
        return self._connection.requests

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the node has yet to compute, as far as is known now. A decode node
        without sequences has none: a report that says otherwise is older than their end."""
        load = self.inflight_load
        return load.queued_tokens if self.is_prefill or self.sequences else load.compute_tokens

    def has_room(self, tokens: int) -> bool:
        """True if that many tokens fit, or if it is unknown."""
        room = self.inflight_load.room_tokens
        return room is None or room >= tokens

    def holds(self, key: int) -> bool:
        """True if it holds, or will hold, the prefix with this key."""
        known = key in self.prefixes.keys or self.inflight_load.expects(key)
        return known and not self.lost

    @property
    def ejected(self) -> bool:
        """True if requests should rather go elsewhere."""
        return bool(self.unreachable) or (self.ejection.doubtful and self.ejection.ejected)

    @property
    def state(self) -> str:
        """Its state in a word, for operators."""
        if self.draining:
            return "draining"
        return "unreachable" if self.unreachable else "ready"

    @property
    def taken_out(self) -> bool:
        """True if an operator wants no more work on it."""
        return self.to_drain or self.next_role != pb.ROLE_UNSPECIFIED

    @property
    def finished(self) -> bool:
        """True if its silence is no loss: it has left, or it drains to end and no request would end
        with it."""
        # One that changes its role is expected back.
        ends = self.draining and self.next_role == pb.ROLE_UNSPECIFIED
        # Decode nodes do without a prefill node, and one of --pd-url never tells that it leaves.
        return self.left or (ends and (self.is_prefill or not self._serves))

    @property
    def _serves(self) -> bool:
        """True if a request may run on it, of this router or by its last report."""
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
        """The entry of a prompt that is being placed here, for ``inflight_load``."""
        sample = islice(self.prefixes.sample(prompt), MAX_EXPECTED_KEYS)
        keys = tuple(key for _, key in sample)
        self.prefixes.expect(keys)
        return InflightPrompt(compute_tokens, len(prompt.tokens), keys)

    # -- changes -----------------------------------------------------------------------------

    def report(self, load: pb.Load, prefixes: pb.Prefixes) -> None:
        """Take over what a join or a heartbeat reports."""
        clamp_load(load)
        self._learn_links(load)
        self.load = _copied(load)
        self.rate = load.prefill_tokens_per_second
        has_blocks = load.total_blocks and load.block_size
        room = load.free_blocks * load.block_size if has_blocks else None
        # The report was written a little before it arrived, perhaps with requests that have ended.
        peak = self._connection.take_peak()
        self._other_sequences = max(0, load.running + load.waiting - peak)
        self._count_sequences()
        self.inflight_load.reported(load.queued_prefill_tokens, room)
        self.prefixes.update(prefixes)

    def _count_sequences(self) -> None:
        self.sequences = self._connection.sequences + self._other_sequences

    def _learn_links(self, load: pb.Load) -> None:
        """Move the rates that have changed out of a report; 0 removes a link."""
        for link in load.link_rates:
            self._link_rates.pop(link.node_id, None)
            if link.tokens_per_second:
                self._link_rates[link.node_id] = link.tokens_per_second
        load.ClearField("link_rates")
        while len(self._link_rates) > MAX_LINKS:
            del self._link_rates[next(iter(self._link_rates))]

    def drain(self, seconds: float | None = None) -> None:
        """Place nothing more here; the reply to the node's next heartbeat tells it to drain. What
        runs there has ``seconds``, or as long as it takes."""
        log.info("node %s is to drain", self.node_id)
        self.to_drain = self.draining = True
        self.drain_seconds = seconds

    def switch(self, role: pb.Role) -> None:
        """Drain the node until it joins again in this role."""
        log.info("node %s is to change its role", self.node_id)
        self.next_role, self.draining = role, True

    def reach(self, problem: str) -> None:
        """Note why the node cannot be reached; empty if it can."""
        if self.unreachable and not problem:
            self.ejection.reached()
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
        self.ejection.sent(remote, compiles=request.sampling.HasField("structured_outputs"))
        return remote

    def end(self, remote: RemoteRequest) -> None:
        """End a request, whether it has finished or not."""
        self._connection.end(remote)
        self._count_sequences()
        self.ejection.ended(remote)

    async def reconnect(self, remote: RemoteRequest) -> bool:
        """Replace the connection that a request has lost; false if the node is not reached soon."""
        return await self._connection.reconnect(remote)

    def end_choice(self, internal_id: int, index: int) -> None:
        """End one choice of a request on the node."""
        self._connection.end_choice(internal_id, index)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()


def _copied(message: M) -> M:
    made = type(message)()
    made.CopyFrom(message)
    return made
