"""Keeps a node known to a router: join, heartbeat, join again after its restart, leave.

At rest a heartbeat has a few hundred bytes. A node that has joined goes on with heartbeats when the
router does not answer in time: joining again is for a router that says that it does not know it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from itertools import islice

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import RegistryStub
from ..process.backoff import Backoff
from ..security.credentials import INSECURE, Credentials

log = logging.getLogger("tandem.node")

CALL_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.2
# A router that restarts has its nodes back after at most this; an operator who corrects the cause
# of a refusal waits a little longer.
LONGEST_AWAY_SECONDS = 3.0
LONGEST_REFUSED_SECONDS = 15.0
# A fleet that started together does not send its heartbeats together.
JITTER = 0.1
# A link's rate is told again when it is this much faster or slower, a few with each heartbeat.
RATE_CHANGE = 0.2
MAX_RATES = 8
# The router has answered that it does not take this node as it is.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)
# A router that comes back after an hour must not wait for a backoff that has grown meanwhile.
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))


class Registration:
    """One node's standing with one router.

    It is retried for ever: neither a refusal nor an error ends the node, which may serve other
    routers and has streams that need no registration. ``joined`` tells whether the router has the
    node, ``refusal`` why it does not take it.

    ``describe`` gives a fresh ``JoinRequest``; ``prefixes`` what has changed in the prefix index
    since a version of it, if there is one.
    ``on_drain`` is called when an operator has told the router that this node is to end, with the
    seconds that running requests have for that (``None``: no limit), ``on_role`` when it is to take
    on another role.
    """

    def __init__(
        self,
        router: str,
        describe: Callable[[], pb.JoinRequest],
        on_drain: Callable[[float | None], None],
        credentials: Credentials = INSECURE,
        *,
        prefixes: Callable[[int], pb.Prefixes | None] = lambda version: None,
        on_role: Callable[[pb.Role], None] = lambda role: None,
    ) -> None:
        self.router = router
        self._describe = describe
        self._on_drain = on_drain
        self._prefixes = prefixes
        self._on_role = on_role
        self._credentials = credentials
        self.draining = False
        self.joined = False
        self.refusal = ""
        self._trouble = ""
        self._standing: _RouterLink | None = None
        self._limit: tuple[float | None] | None = None  # of the drain that was asked for
        self._away = Backoff(FIRST_RETRY_SECONDS, LONGEST_AWAY_SECONDS)
        self._refused = Backoff(FIRST_RETRY_SECONDS, LONGEST_REFUSED_SECONDS)

    async def run(self) -> None:
        """Until cancelled; then the router is told that the node leaves."""
        while True:
            generation = self._credentials.generation
            async with self._credentials.channel(self.router, _CHANNEL) as channel:
                stub = self._credentials.stub(RegistryStub, channel)
                try:
                    while generation == self._credentials.generation:
                        pause = await self._call(stub)
                        await asyncio.sleep(pause)
                except asyncio.CancelledError:
                    await self._leave(stub)
                    raise

    async def _call(self, stub: RegistryStub) -> float:
        """One call to the router, answered or not; returns the pause until the next."""
        try:
            return await self._introduce_or_beat(stub)
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        except Exception:
            self.joined, self._standing = False, None
            log.exception("the registration with router %s failed", self.router)
            return self._refused.pause()

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        """Log trouble that is new; returns the pause until the next attempt."""
        refused = error.code() in _REFUSALS
        trouble = str(error.details()) if refused else self._credentials.explain(error)
        if self.joined or trouble != self._trouble:
            what = "refuses this node, which asks again" if refused else "does not answer"
            log.warning("router %s %s: %s", self.router, what, trouble)
        self.joined, self._trouble = False, trouble
        self.refusal = trouble if refused else ""
        pause = (self._refused if refused else self._away).pause()
        if refused:
            self._standing = None
        # While the router may still know this node, it must hear of it before it gives it up.
        return min(pause, self._standing.period) if self._standing is not None else pause

    def _has_joined(self, message: str) -> None:
        log.info(message, self.router)
        self.joined, self.refusal, self._trouble = True, "", ""

    async def _introduce_or_beat(self, stub: RegistryStub) -> float:
        me = self._describe()
        if self._standing is None or self._standing.role != me.role:
            return await self._join(stub, me)
        return await self._beat(stub, me, self._standing)

    async def _join(self, stub: RegistryStub, me: pb.JoinRequest) -> float:
        self._standing = None
        reply = await stub.Join(me, timeout=CALL_SECONDS)
        self._has_joined("joined router %s")
        self._standing = _RouterLink(me.role, reply.heartbeat_seconds, reply.prefix_version)
        self._standing.rates_told(me.load.link_rates)
        # A join says neither which prefixes are held here nor that the node drains.
        return 0.0

    async def _beat(self, stub: RegistryStub, me: pb.JoinRequest, standing: _RouterLink) -> float:
        rates = standing.new_rates(me.load.link_rates)
        del me.load.link_rates[:]
        me.load.link_rates.extend(rates)
        answer = await stub.Heartbeat(
            pb.HeartbeatRequest(
                node_id=me.node_id,
                epoch=me.epoch,
                load=me.load,
                draining=self.draining,
                prefixes=self._prefixes(standing.prefix_version),
            ),
            timeout=CALL_SECONDS,
        )
        if not answer.known:
            self._standing = None
            return self._away.pause()
        if not self.joined:
            self._has_joined("router %s answers again, and has kept this node")
        self._away.reset()
        self._refused.reset()
        standing.rates_told(rates)
        standing.prefix_version = answer.prefix_version
        self._obey(answer, me.role)
        return standing.period * random.uniform(1 - JITTER, 1)

    def _obey(self, answer: pb.HeartbeatReply, role: pb.Role) -> None:
        """What an operator has told the router; once is enough, unless it is told another limit."""
        if answer.drain:
            seconds = answer.drain_seconds if answer.HasField("drain_seconds") else None
            if self._limit == (seconds,):
                return
            self._limit = (seconds,)
            limit = "without a limit" if seconds is None else f"for at most {seconds:g} s"
            log.info("router %s asks this node to drain, %s", self.router, limit)
            self._on_drain(seconds)
        elif answer.role not in (pb.ROLE_UNSPECIFIED, role) and not self.draining:
            self._on_role(answer.role)

    async def _leave(self, stub: RegistryStub) -> None:
        me = self._describe()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Leave(
                pb.LeaveRequest(node_id=me.node_id, epoch=me.epoch), timeout=CALL_SECONDS
            )


class _RouterLink:
    """What a router that this node has joined knows of it."""

    def __init__(self, role: pb.Role, period: float, prefix_version: int) -> None:
        self.role = role
        self.period = period
        self.prefix_version = prefix_version
        self._rates: dict[str, float] = {}

    def new_rates(self, rates: Iterable[pb.LinkRate]) -> list[pb.LinkRate]:
        """At most ``MAX_RATES`` of those that the router does not know like this: new ones first,
        then those that it was told of the longest ago."""
        measured = {rate.node_id: rate.tokens_per_second for rate in rates}
        names = [*(name for name in measured if name not in self._rates), *self._rates]
        changed = (name for name in names if self._differs(name, measured.get(name, 0.0)))
        return [
            pb.LinkRate(node_id=name, tokens_per_second=measured.get(name, 0.0))
            for name in islice(changed, MAX_RATES)
        ]

    def _differs(self, name: str, rate: float) -> bool:
        told = self._rates.get(name, 0.0)
        return abs(rate - told) > RATE_CHANGE * max(rate, told)

    def rates_told(self, rates: Iterable[pb.LinkRate]) -> None:
        """The router has got these."""
        for rate in rates:
            self._rates.pop(rate.node_id, None)
            if rate.tokens_per_second:
                self._rates[rate.node_id] = rate.tokens_per_second
