"""The receiving side of one attempt: one peer fills the blocks of one reception.

``_Receiving.run`` goes through all of its states::

    reserved ─► opening ─► receiving ─► verifying ─► committed
        └──────────┴───────────┴────────────┴─► failed

Events of the ranks and messages of the peer share one queue. Every wait for one ends with the
deadline of the state or of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..proto import tandem_pb2 as pb
from ..shared.causes import Cause
from ..shared.config import HandoffConfig
from ..shared.engine.reception import Reception
from ..shared.engine.start import NodeEngine, NodeIdentity
from ..shared.errors import TransferError
from ..shared.handoff.inbox import Inbox
from ..shared.handoff.plane.messages import (
    WINDOW_OF_CARRIER,
    Expect,
    Expecting,
    Received,
    ReceiveFailed,
)
from ..shared.handoff.transfer import DecodeState, decode_transfer_state
from ..shared.handoff.wire.layer_windows import first_tokens
from ..shared.process.standstill import within
from ..shared.process.tasks import uninterrupted
from ..shared.telemetry.tracing import current, metadata
from .peering.peer import Peer, PeerLostError, rpc_errors

# Wait for the peer's last message: a rank notices a lost peer before the control plane does.
LAST_MESSAGE_SECONDS = 1.0
# Wait for unread messages after a standstill of this process. Peers send one each second.
UNREAD_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a committed attempt, which has filled the blocks up to token ``end``.

    From token ``whole_from`` on every layer has its KV; before it, layers with a window lack some.
    ``done`` is the peer's final report, if it arrived.
    """

    bytes: int
    done: pb.OpenDone | None
    end: int
    whole_from: int = 0


@dataclass(frozen=True, slots=True)
class ReceivingNode:
    """The parts of a decode node that attempts need."""

    engine: NodeEngine
    identity: NodeIdentity
    inbox: Inbox
    config: HandoffConfig

    async def receive(
        self,
        reception: Reception,
        peer: Peer,
        transfer_id: int,
        attempt: int,
        end: int,
        seconds: float,
    ) -> TransferResult:
        """Fill the blocks from the first token that is not cached up to prompt token ``end``.

        ``seconds`` is the time until the request's deadline. On return every block is filled and
        checked; after an exception no rank writes to them any longer.
        Raises ``TransferError``; ``PeerLostError`` if the peer must be greeted again.
        """
        return await _Receiving(self, reception, peer, transfer_id, attempt, end, seconds).run()


class _Receiving:
    def __init__(
        self,
        node: ReceivingNode,
        reception: Reception,
        peer: Peer,
        transfer_id: int,
        attempt: int,
        end: int,
        seconds: float,
    ) -> None:
        self._node = node
        self._sequence = sequence = reception.sequence
        self._peer = peer
        self._end = end
        self._seconds = seconds
        self._attempt = node.inbox.open(transfer_id, attempt)
        self._transfer = decode_transfer_state(
            f"transfer {transfer_id} attempt {attempt}",
            request_seconds=seconds,
            silence_seconds=node.config.progress_timeout,
            clock=time.monotonic,
        )
        # A canary compares the KV of all tokens.
        resume_at = 0 if sequence.work.private else reception.resume_at
        self._resume_at = min(resume_at, end)
        self._first_tokens = first_tokens(node.engine.spec, sequence.computed, end, self._resume_at)
        self._ranks_greeted = self._ranks_filled = self._bytes = 0
        self._done: pb.OpenDone | None = None
        self._peer_failed = False
        self._rpc: Any = None
        self._listener: asyncio.Task[None] | None = None

    async def run(self) -> TransferResult:
        parts = len(self._peer.parts)
        try:
            self._expect()
            await self._until(lambda: self._ranks_greeted == parts)
            self._open()
            await self._until(lambda: self._ranks_filled == parts)
            self._enter(DecodeState.VERIFYING)
            await self._compare_counts()
            self._enter(DecodeState.COMMITTED)
            if self._done is not None:
                self._peer.link.add_transfer(self._end - self._sequence.computed, self._done)
            return TransferResult(self._bytes, self._done, self._end, max(self._first_tokens))
        except TransferError as error:
            if self._transfer.state is not DecodeState.RECEIVING:
                raise
            last = await self._explain(error)
            raise type(last)(str(last), cause=last.cause, computing=True) from error
        finally:
            await uninterrupted(self._close())

    # ---- the states --------------------------------------------------------------------------

    def _expect(self) -> None:
        """Let the ranks greet their peers and accept frames for these blocks."""
        sequence, peer, config = self._sequence, self._peer, self._node.config
        for part in peer.parts:
            ends = peer.endpoints[part.sender]
            expect = Expect(
                transfer_id=self._attempt.transfer_id,
                attempt=self._attempt.attempt,
                peer_node=peer.node_id,
                peer_epoch=peer.epoch,
                peer_rank=part.sender,
                bulk=ends.bulk,
                control=ends.control,
                key=ends.key,
                block_table=tuple(sequence.block_table),
                first_token=sequence.computed,
                end_token=self._end,
                first_tokens=self._first_tokens,
                heads=part.heads,
                window_bytes=config.window_bytes or WINDOW_OF_CARRIER,
                deadline_seconds=self._seconds,
            )
            self._node.inbox.command(self._attempt, part.receiver, expect)

    def _open(self) -> None:
        sequence, config = self._sequence, self._node.config
        request = pb.OpenRequest(
            transfer_id=self._attempt.transfer_id,
            attempt=self._attempt.attempt,
            node_id=self._node.identity.node_id,
            epoch=self._node.identity.epoch,
            peer_epoch=self._peer.epoch,
            prompt=sequence.prompt,
            first_token=sequence.computed,
            end_token=self._end,
            priority=sequence.priority,
            cache_salt=sequence.salt,
            deadline_seconds=self._transfer.request_remaining,
            window_bytes=config.window_bytes or WINDOW_OF_CARRIER,
            private=sequence.work.private,
            ranks=self._node.engine.world_size,
            kv_dtype=self._node.engine.kv_dtype,
            resume_at=self._resume_at,
            mid_stream=sequence.mid_stream,
        )
        self._enter(DecodeState.OPENING)
        self._peer.trust.begin(self._attempt.transfer_id)
        with rpc_errors():
            self._rpc = self._peer.stub.Open(request, metadata=metadata(current()))
        self._listener = asyncio.create_task(_listen(self._rpc, self._attempt.events))

    async def _compare_counts(self) -> None:
        """Compare the number of bytes that the peer sent with the number received.

        If the peer falls silent only now, the KV is still used: every rank has verified its bytes.
        If it reports a failure, it is not: the step may have computed non-finite values.
        """
        try:
            await self._until(lambda: self._done is not None)
        except TransferError:
            if self._peer_failed:
                raise
        if self._done is not None and self._done.bytes != self._bytes:
            raise TransferError(
                f"{self._peer.address} sent {self._done.bytes} bytes, {self._bytes} arrived",
                cause=Cause.INCOMPLETE,
            )

    async def _explain(self, error: TransferError) -> TransferError:
        """A more specific error for a lost peer, if it reports within ``LAST_MESSAGE_SECONDS`` that
        one of its ranks died, or if its control plane is lost too."""
        if error.cause is not Cause.PEER_LOST:
            return error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                while not isinstance(error, PeerLostError):
                    try:
                        self._handle(await self._attempt.events.get())
                    except TransferError as other:
                        if other.cause is Cause.DIED or isinstance(other, PeerLostError):
                            error = other
                            break
        return error

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        if self._rpc is not None:
            self._rpc.cancel()
        await self._node.inbox.close(self._attempt, sending=False)
        self._peer.trust.end(self._attempt.transfer_id)
        if not self._transfer.over:
            self._enter(DecodeState.FAILED)

    def _enter(self, state: DecodeState) -> None:
        if self._transfer.enter(state):
            current().event(state.value)

    # ---- events ------------------------------------------------------------------------------

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._handle(await self._next())

    async def _next(self) -> object:
        """The next event. Raises ``TransferError`` if the state or the lease is overdue."""
        with contextlib.suppress(TimeoutError):
            return await within(
                min(self._transfer.remaining, self._lease_seconds()),
                self._attempt.events.get,
                afterwards=UNREAD_SECONDS,
                unless=lambda: self._lease_seconds() <= 0,
            )
        raise self._overdue_error()

    def _lease_seconds(self) -> float:
        return self._peer.trust.remaining(self._attempt.transfer_id)

    def _overdue_error(self) -> TransferError:
        address = self._peer.address
        if self._done is not None:
            missing = f"{address} reports that it is done, but bytes are missing"
            return TransferError(missing, cause=Cause.INCOMPLETE)
        reason = self._transfer.overdue()
        if not reason:
            return TransferError(f"{address} has not renewed the lease", cause=Cause.LEASE)
        if self._transfer.request_over:
            return TransferError(f"{address}: {reason}", cause=Cause.TIMEOUT_TRANSFER)
        opened = self._transfer.state in (DecodeState.OPENING, DecodeState.RECEIVING)
        if opened and self._transfer.idle >= self._node.config.progress_timeout:
            opening = self._transfer.state is DecodeState.OPENING
            cause = Cause.TIMEOUT_OPEN if opening else Cause.TIMEOUT_PROGRESS
            return PeerLostError(f"{address} is silent: {reason}", cause=cause)
        greeting = self._transfer.state is DecodeState.RESERVED
        cause = Cause.TIMEOUT_GREET if greeting else Cause.TIMEOUT_TRANSFER
        return TransferError(f"{address}: {reason}", cause=cause)

    def _handle(self, event: object) -> None:
        if isinstance(event, TransferError):
            raise event
        if isinstance(event, ReceiveFailed):
            raise TransferError(event.reason, cause=Cause(event.cause))
        if isinstance(event, Expecting):
            self._ranks_greeted += 1
        elif isinstance(event, Received):
            # The bytes may arrive before the peer's message that it accepts the transfer.
            self._enter(DecodeState.RECEIVING)
            self._ranks_filled += 1
            self._bytes += event.bytes
        elif isinstance(event, pb.OpenEvent):
            self._handle_peer(event)

    def _handle_peer(self, event: pb.OpenEvent) -> None:
        self._enter(DecodeState.RECEIVING)
        self._transfer.progress()
        if event.HasField("failed"):
            self._peer_failed = True
            cause = Cause(event.failed.cause)
            raise TransferError(f"{self._peer.address}: {event.failed.reason}", cause=cause)
        if event.HasField("done"):
            if not math.isfinite(event.done.compute_seconds + event.done.exposed_seconds):
                raise TransferError(f"{self._peer.address} reported invalid durations")
            self._done = event.done


async def _listen(rpc: Any, events: asyncio.Queue[object]) -> None:
    """Pass on the peer's messages, then a ``TransferError`` unless the last one was an outcome."""
    try:
        with rpc_errors():
            async for event in rpc:
                events.put_nowait(event)
                if event.WhichOneof("event") in ("done", "failed"):
                    return
        reason = "the stream ended without an outcome"
        events.put_nowait(TransferError(reason, cause=Cause.PEER_FAILED))
    except TransferError as error:
        events.put_nowait(error)
