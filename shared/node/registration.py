"""Keeps a node known to a router: join, heartbeat, join again after its restart, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import RegistryStub
from ..backoff import Backoff
from ..lock import OPEN, Lock

log = logging.getLogger("tandem.node")

CALL_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.2
# A router that restarts has its nodes back after at most this; an operator who corrects the cause
# of a refusal waits a little longer.
LONGEST_AWAY_SECONDS = 3.0
LONGEST_REFUSED_SECONDS = 15.0
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
        lock: Lock = OPEN,
        *,
        prefixes: Callable[[int], pb.Prefixes | None] = lambda version: None,
        on_role: Callable[[pb.Role], None] = lambda role: None,
    ) -> None:
        self.router = router
        self._describe = describe
        self._on_drain = on_drain
        self._prefixes = prefixes
        self._on_role = on_role
        self._lock = lock
        self.draining = False
        self.joined = False
        self.refusal = ""
        self._trouble = ""
        self._away = Backoff(FIRST_RETRY_SECONDS, LONGEST_AWAY_SECONDS)
        self._refused = Backoff(FIRST_RETRY_SECONDS, LONGEST_REFUSED_SECONDS)

    async def run(self) -> None:
        """Until cancelled; then the router is told that the node leaves."""
        while True:
            generation = self._lock.generation
            async with self._lock.channel(self.router, _CHANNEL) as channel:
                stub = self._lock.stub(RegistryStub, channel)
                try:
                    while generation == self._lock.generation:
                        pause = await self._standing(stub)
                        await asyncio.sleep(pause)
                except asyncio.CancelledError:
                    await self._leave(stub)
                    raise

    async def _standing(self, stub: RegistryStub) -> float:
        """Join, and stay until that ends; returns the pause until the next attempt."""
        try:
            await self._join_and_beat(stub)
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        except Exception:
            self.joined = False
            log.exception("the registration with router %s failed", self.router)
            return self._refused.pause()
        return 0.0

    def _failed(self, error: grpc.aio.AioRpcError) -> float:
        """Log trouble that is new; returns the pause until the next attempt."""
        refused = error.code() in _REFUSALS
        trouble = str(error.details()) if refused else self._lock.explain(error)
        if self.joined or trouble != self._trouble:
            what = "refuses this node, which asks again" if refused else "does not answer"
            log.warning("router %s %s: %s", self.router, what, trouble)
        self.joined, self._trouble = False, trouble
        self.refusal = trouble if refused else ""
        return (self._refused if refused else self._away).pause()

    def _has_joined(self) -> None:
        log.info("joined router %s", self.router)
        self.joined, self.refusal, self._trouble = True, "", ""

    async def _join_and_beat(self, stub: RegistryStub) -> None:
        """Returns when the node must be introduced anew: its role is another, or the router has
        forgotten it, as it does when it restarts."""
        joined = self._describe()
        joined.prefixes.MergeFrom(self._prefixes(0) or pb.Prefixes())
        reply = await stub.Join(joined, timeout=CALL_SECONDS)
        self._has_joined()
        version = joined.prefixes.version
        # A join does not say that the node drains: until the first heartbeat it would get work.
        pause = 0.0 if self.draining else reply.heartbeat_seconds
        while True:
            await asyncio.sleep(pause)
            pause = reply.heartbeat_seconds
            me = self._describe()
            if me.role != joined.role:
                return
            answer = await stub.Heartbeat(
                pb.HeartbeatRequest(
                    node_id=me.node_id,
                    epoch=me.epoch,
                    load=me.load,
                    draining=self.draining,
                    prefixes=self._prefixes(version),
                ),
                timeout=CALL_SECONDS,
            )
            if not answer.known:
                return
            self._away.reset()
            self._refused.reset()
            version = answer.prefix_version
            self._obey(answer, me.role)

    def _obey(self, answer: pb.HeartbeatReply, role: pb.Role) -> None:
        """What an operator has told the router; once is enough."""
        if self.draining:
            return
        if answer.drain:
            seconds = answer.drain_seconds if answer.HasField("drain_seconds") else None
            limit = "without a limit" if seconds is None else f"for at most {seconds:g} s"
            log.info("router %s asks this node to drain, %s", self.router, limit)
            self._on_drain(seconds)
        elif answer.role not in (pb.ROLE_UNSPECIFIED, role):
            self._on_role(answer.role)

    async def _leave(self, stub: RegistryStub) -> None:
        me = self._describe()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Leave(
                pb.LeaveRequest(node_id=me.node_id, epoch=me.epoch), timeout=CALL_SECONDS
            )
