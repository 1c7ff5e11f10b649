"""Keeps a node known to a router: join, heartbeat, join again after its restart, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import RegistryStub
from ..errors import PeerRefusedError
from ..lock import OPEN, Lock

log = logging.getLogger("tandem.node")

CALL_SECONDS = 2.0
RETRY_SECONDS = 0.2
# Asking again would get the same answer.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)
# A router that comes back after an hour must not wait for a backoff that has grown meanwhile.
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))


class Registration:
    """One node's standing with one router.

    ``describe`` gives a fresh ``JoinRequest``; ``metrics`` the samples of a heartbeat; ``prefixes``
    what has changed in the prefix index since a version of it, if there is one.
    ``on_refused`` is called when the router will never take this node, ``on_drain`` when an
    operator has told the router that this node is to end, ``on_role`` that it is to take on another
    role.
    """

    def __init__(
        self,
        router: str,
        describe: Callable[[], pb.JoinRequest],
        metrics: Callable[[], list[pb.Metric]],
        on_refused: Callable[[str], None],
        on_drain: Callable[[], None],
        lock: Lock = OPEN,
        *,
        prefixes: Callable[[int], pb.Prefixes | None] = lambda version: None,
        on_role: Callable[[pb.Role], None] = lambda role: None,
    ) -> None:
        self._router = router
        self._describe = describe
        self._metrics = metrics
        self._on_refused = on_refused
        self._on_drain = on_drain
        self._prefixes = prefixes
        self._on_role = on_role
        self._lock = lock
        self.draining = False
        self.joined = False
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled; then the router is told that the node leaves."""
        async with self._lock.channel(self._router, _CHANNEL) as channel:
            stub = self._lock.stub(RegistryStub, channel)
            try:
                while True:
                    try:
                        await self._join_and_beat(stub)
                    except PeerRefusedError as error:
                        self._on_refused(str(error))
                        return
                    except grpc.aio.AioRpcError as error:
                        self._note(error)
                        await asyncio.sleep(RETRY_SECONDS)
            finally:
                await self._leave(stub)

    def _note(self, error: grpc.aio.AioRpcError) -> None:
        """The router is away. It is asked often, so the same trouble is logged once."""
        trouble = self._lock.explain(error)
        if self.joined or trouble != self._trouble:
            log.warning("router %s does not answer: %s", self._router, trouble)
        self.joined, self._trouble = False, trouble

    async def _join_and_beat(self, stub: RegistryStub) -> None:
        """Returns when the node must be introduced anew: its role is another, or the router has
        forgotten it, as it does when it restarts."""
        joined = self._describe()
        joined.prefixes.MergeFrom(self._prefixes(0) or pb.Prefixes())
        try:
            reply = await stub.Join(joined, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                raise PeerRefusedError(f"router {self._router}: {error.details()}") from None
            raise
        self.joined = True
        log.info("joined router %s", self._router)
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
                    metrics=self._metrics(),
                    prefixes=self._prefixes(version),
                ),
                timeout=CALL_SECONDS,
            )
            if not answer.known:
                return
            version = answer.prefix_version
            self._obey(answer, me.role)

    def _obey(self, answer: pb.HeartbeatReply, role: pb.Role) -> None:
        """What an operator has told the router; once is enough."""
        if self.draining:
            return
        if answer.drain:
            log.info("router %s asks this node to drain", self._router)
            self._on_drain()
        elif answer.role not in (pb.ROLE_UNSPECIFIED, role):
            self._on_role(answer.role)

    async def _leave(self, stub: RegistryStub) -> None:
        me = self._describe()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Leave(
                pb.LeaveRequest(node_id=me.node_id, epoch=me.epoch), timeout=CALL_SECONDS
            )
