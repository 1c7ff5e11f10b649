"""A node's registration with a router: join, heartbeats, rejoin after the router's restart, leave.

An idle node's heartbeat is a few hundred bytes. If the router does not reply in time, the node
continues with heartbeats; it joins again only if the router replies that it does not know it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import RegistryStub
from ..errors import UsageError
from ..process.backoff import Backoff
from ..security.credentials import INSECURE, LASTING, Credentials

if TYPE_CHECKING:
    from ...proto.tandem_pb2_grpc import RegistryAsyncStub

log = logging.getLogger("tandem.node")

RPC_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.2
# Longest pauses: the first delays nodes after a router's restart, the second an operator who has
# removed the cause of a rejection.
MAX_AWAY_PAUSE_SECONDS = 3.0
MAX_REFUSED_PAUSE_SECONDS = 15.0
# Spreads the heartbeats of nodes that started together.
JITTER = 0.1
# A link's rate is reported again if it has changed by this share; a heartbeat has a few rates.
RATE_CHANGE = 0.2
MAX_RATES = 8
# A join includes the router's RPC to this node, which may have to wait for other joins.
JOIN_SECONDS = 5.0
# Codes with which a router rejects a node.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.ABORTED,
)
# The rejection that may pass at any moment: the router could not reach this node.
_UNREACHED = grpc.StatusCode.ABORTED


class Registration:
    """The registration of one node with one router.

    It is retried forever: neither a rejection nor an error ends the node, which may serve other
    routers and whose streams need no registration. ``problem`` is the reason why the router cannot
    use the node at present; empty if it can.

    ``describe`` returns a fresh ``JoinRequest``, ``announce`` its address if that depends on the
    router, ``prefixes`` the changes of the prefix index since a version, if there is an index.
    ``on_drain`` is called when an operator drains the node through the router, with the time limit
    of running requests in seconds (``None``: no limit), ``on_role`` when an operator switches its
    role. ``failure`` returns the reason if the node ends by itself.
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
        announce: Callable[[], Awaitable[str]] | None = None,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        self.router = router
        self._describe = describe
        self._on_drain = on_drain
        self._prefixes = prefixes
        self._on_role = on_role
        self._announce = announce
        self._failure = failure
        self._credentials = credentials
        self.draining = False
        self.problem = "it has not replied yet"
        self._logged = ""
        self._link: _RouterLink | None = None
        self._limit: tuple[float | None] | None = None  # of the commanded drain
        self._away = Backoff(FIRST_RETRY_SECONDS, MAX_AWAY_PAUSE_SECONDS)
        self._refused = Backoff(FIRST_RETRY_SECONDS, MAX_REFUSED_PAUSE_SECONDS)

    async def run(self) -> None:
        """Keep the node registered until cancelled; then leave the router."""
        while True:
            generation = self._credentials.generation
            async with self._credentials.channel(self.router, LASTING) as channel:
                stub = self._credentials.stub(RegistryStub, channel)
                try:
                    while generation == self._credentials.generation:
                        pause = await self._report(stub)
                        await asyncio.sleep(pause)
                except asyncio.CancelledError:
                    await self._leave(stub)
                    raise

    async def _report(self, stub: RegistryAsyncStub) -> float:
        """Join or send a heartbeat; returns the pause until the next one."""
        try:
            return await self._join_or_beat(stub)
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        except (UsageError, OSError) as error:  # no address to announce
            self._link = None
            self._warn(f"router {self.router} cannot be joined: {error}", str(error))
            return self._away.pause()
        except Exception:
            self._link = None
            self.problem = "the registration failed; see the log"
            log.exception("the registration with router %s failed", self.router)
            return self._refused.pause()

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        """Log a problem once; returns the pause until the next attempt."""
        refused = error.code() in _REFUSALS
        problem = str(error.details()) if refused else self._credentials.explain(error)
        what = "rejects this node, which will retry" if refused else "does not answer"
        self._warn(f"router {self.router} {what}: {problem}", f"{what}: {problem}")
        lasts = refused and error.code() is not _UNREACHED
        pause = (self._refused if lasts else self._away).pause()
        if refused:
            self._link = None
        # While the router may still know this node, its next heartbeat must arrive before the
        # timeout.
        return min(pause, self._link.period) if self._link is not None else pause

    def _warn(self, message: str, problem: str) -> None:
        """Log a problem, unless it was the last one logged."""
        self.problem = problem
        if message != self._logged:
            self._logged = message
            log.warning("%s", message)

    def _serves(self, message: str) -> None:
        """Note that the router has this node and can reach it."""
        log.info(message, self.router)
        self.problem = self._logged = ""

    async def _join_or_beat(self, stub: RegistryAsyncStub) -> float:
        me = self._describe()
        if self._link is None or self._link.role != me.role:
            return await self._join(stub, me)
        return await self._beat(stub, me, self._link)

    async def _join(self, stub: RegistryAsyncStub, me: pb.JoinRequest) -> float:
        self._link = None
        if self._announce is not None:
            me.address = await self._announce()
        reply = await stub.Join(me, timeout=JOIN_SECONDS)
        self._serves("joined router %s")
        self._link = _RouterLink(me, reply.heartbeat_seconds, reply.prefix_version)
        self._link.rates_reported(me.load.link_rates)
        # The first heartbeat follows at once: a join has neither prefixes nor the draining flag.
        return 0.0

    async def _beat(self, stub: RegistryAsyncStub, me: pb.JoinRequest, link: _RouterLink) -> float:
        rates = link.new_rates(me.load.link_rates)
        del me.load.link_rates[:]
        me.load.link_rates.extend(rates)
        reply = await stub.Heartbeat(
            pb.HeartbeatRequest(
                node_id=me.node_id,
                epoch=me.epoch,
                load=me.load,
                draining=self.draining,
                prefixes=self._prefixes(link.prefix_version),
            ),
            timeout=RPC_SECONDS,
        )
        if not reply.known:
            self._link = None
            return self._away.pause()
        if reply.unreachable:
            message = f"router {self.router} has this node, but: {reply.unreachable}"
            self._warn(message, reply.unreachable)
            if await self._has_moved(link):
                self._link = None
                return 0.0
        elif self.problem:
            self._serves("router %s has this node and can reach it again")
        self._away.reset()
        self._refused.reset()
        link.rates_reported(rates)
        link.prefix_version = reply.prefix_version
        self._obey(reply, me.role)
        return link.period * random.uniform(1 - JITTER, 1)

    async def _has_moved(self, link: _RouterLink) -> bool:
        """True if the address announced to the router is no longer this machine's."""
        if self._announce is None:
            return False
        try:
            return await self._announce() != link.address
        except (UsageError, OSError):
            return False

    def _obey(self, reply: pb.HeartbeatReply, role: pb.Role) -> None:
        """Obey an operator's command in a heartbeat's reply; ignore a repeated one unless its limit
        has changed."""
        if reply.drain:
            seconds = reply.drain_seconds if reply.HasField("drain_seconds") else None
            if self._limit == (seconds,):
                return
            self._limit = (seconds,)
            limit = "without a limit" if seconds is None else f"for at most {seconds:g} s"
            log.info("router %s drains this node, %s", self.router, limit)
            self._on_drain(seconds)
        elif reply.role not in (pb.ROLE_UNSPECIFIED, role) and not self.draining:
            self._on_role(reply.role)

    async def _leave(self, stub: RegistryAsyncStub) -> None:
        me = self._describe()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Leave(
                pb.LeaveRequest(node_id=me.node_id, epoch=me.epoch, failure=self._failure()),
                timeout=RPC_SECONDS,
            )


class _RouterLink:
    """The state of this node that a joined router knows."""

    def __init__(self, request: pb.JoinRequest, period: float, prefix_version: int) -> None:
        self.role = request.role
        self.address = request.address
        self.period = period
        self.prefix_version = prefix_version
        self._rates: dict[str, float] = {}

    def new_rates(self, rates: Iterable[pb.LinkRate]) -> list[pb.LinkRate]:
        """At most ``MAX_RATES`` rates that differ from the last report: new ones first, then the
        least recently reported."""
        measured = {rate.node_id: rate.tokens_per_second for rate in rates}
        names = [*(name for name in measured if name not in self._rates), *self._rates]
        changed = (name for name in names if self._differs(name, measured.get(name, 0.0)))
        return [
            pb.LinkRate(node_id=name, tokens_per_second=measured.get(name, 0.0))
            for name in islice(changed, MAX_RATES)
        ]

    def _differs(self, name: str, rate: float) -> bool:
        reported = self._rates.get(name, 0.0)
        return abs(rate - reported) > RATE_CHANGE * max(rate, reported)

    def rates_reported(self, rates: Iterable[pb.LinkRate]) -> None:
        """Note rates that the router has received."""
        for rate in rates:
            self._rates.pop(rate.node_id, None)
            if rate.tokens_per_second:
                self._rates[rate.node_id] = rate.tokens_per_second
