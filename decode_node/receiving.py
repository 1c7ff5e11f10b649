"""The receiving side of one attempt: one peer fills one sequence's blocks.

``_Receiving.run`` is the whole life::

    reserved ─► opening ─► receiving ─► verifying ─► committed
        └──────────┴───────────┴────────────┴─► failed

Everything that happens (what the ranks report, what the peer says) is news in one queue, and every
wait for news ends with the deadline of the state or of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..shared.causes import Cause
from ..shared.config import HandoffConfig
from ..shared.engine.sequence import Sequence
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
from ..shared.handoff.transfer import DecodeState, decode_life
from ..shared.handoff.wire.layer_windows import first_tokens
from ..shared.process.uninterrupted import uninterrupted
from ..shared.telemetry.tracing import current, metadata
from .peer import Peer, PeerLostError, calling

# A rank sees at once that its peer is gone; the heads, a little later.
LAST_WORD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a committed attempt brought. ``account`` is the peer's own, if it still gave one.

    From token ``whole_from`` on every layer has its KV; before it, those with a window lack some.
    """

    bytes: int
    account: pb.OpenDone | None
    whole_from: int = 0


@dataclass(frozen=True, slots=True)
class ReceivingNode:
    """What every attempt of this node works with."""

    engine: NodeEngine
    identity: NodeIdentity
    inbox: Inbox
    config: HandoffConfig

    async def receive(
        self, sequence: Sequence, peer: Peer, transfer_id: int, attempt: int, seconds: float
    ) -> Receipt:
        """Fill the sequence's blocks from ``sequence.computed`` to the last prompt token but one.

        ``seconds`` are those that the request has left. On return every block is filled and
        checked; on any exception no rank writes them any more.
        Raises ``TransferError``; ``PeerLostError`` when the peer must be greeted again.
        """
        return await _Receiving(self, sequence, peer, transfer_id, attempt, seconds).run()


class _Receiving:
    def __init__(
        self,
        node: ReceivingNode,
        sequence: Sequence,
        peer: Peer,
        transfer_id: int,
        attempt: int,
        seconds: float,
    ) -> None:
        self._node = node
        self._sequence = sequence
        self._peer = peer
        self._seconds = seconds
        self._attempt = node.inbox.open(transfer_id, attempt)
        self._life = decode_life(
            f"transfer {transfer_id} attempt {attempt}",
            request_seconds=seconds,
            silence_seconds=node.config.progress_timeout,
            clock=time.monotonic,
        )
        # What a canary compares must all have come.
        windows = peer.sends_windows and not sequence.private
        self._resume_at = node.engine.core.resume_at(sequence) if windows else 0
        self._first_tokens = first_tokens(
            node.engine.spec, sequence.computed, len(sequence.prompt) - 1, self._resume_at
        )
        self._greeted = self._filled = self._bytes = 0
        self._account: pb.OpenDone | None = None
        self._peer_failed = False
        self._call: Any = None
        self._listener: asyncio.Task[None] | None = None

    async def run(self) -> Receipt:
        parts = len(self._peer.parts)
        try:
            self._expect()
            await self._until(lambda: self._greeted == parts)
            self._open()
            await self._until(lambda: self._filled == parts)
            self._enter(DecodeState.VERIFYING)
            await self._compare_counts()
            self._enter(DecodeState.COMMITTED)
            if self._account is not None:
                tokens = len(self._sequence.prompt) - 1 - self._sequence.computed
                self._peer.link.moved(tokens, self._account)
            return Receipt(self._bytes, self._account, max(self._first_tokens))
        except TransferError as error:
            error.computing = self._life.state is DecodeState.RECEIVING
            raise await self._explained(error) from None
        finally:
            await uninterrupted(self._close())

    # ---- the steps ---------------------------------------------------------------------------

    def _expect(self) -> None:
        """The ranks greet their peers, and accept frames for these blocks from now on."""
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
                guarded=ends.guarded,
                block_table=tuple(sequence.block_table),
                first_token=sequence.computed,
                end_token=len(sequence.prompt) - 1,
                first_tokens=self._first_tokens,
                first_head=part.heads.start,
                end_head=part.heads.stop,
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
            end_token=len(sequence.prompt) - 1,
            priority=sequence.priority,
            cache_salt=sequence.salt,
            deadline_seconds=self._life.left_of_request,
            window_bytes=config.window_bytes or WINDOW_OF_CARRIER,
            private=sequence.private,
            ranks=self._node.engine.world_size,
            kv_dtype=self._node.engine.kv_dtype,
            resume_at=self._resume_at,
        )
        self._enter(DecodeState.OPENING)
        self._peer.trust.begin(self._attempt.transfer_id)
        with calling():
            self._call = self._peer.stub.Open(request, metadata=metadata(current()))
        self._listener = asyncio.create_task(_listen(self._call, self._attempt.news))

    async def _compare_counts(self) -> None:
        """What the peer has sent must be what arrived. A peer that falls silent only now changes
        nothing: every rank has verified its bytes. One that says it failed does: what it sent may
        come from a step whose numbers are not good."""
        try:
            await self._until(lambda: self._account is not None)
        except TransferError:
            if self._peer_failed:
                raise
        if self._account is not None and self._account.bytes != self._bytes:
            raise TransferError(
                f"{self._peer.address} sent {self._account.bytes} bytes, {self._bytes} arrived",
                cause=Cause.INCOMPLETE,
            )

    async def _explained(self, error: TransferError) -> TransferError:
        """When a rank has lost its peer, the peer's head may be about to say that its rank ended,
        or may have ended itself."""
        if not error.computing or error.cause is not Cause.PEER_LOST:
            return error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_SECONDS):
                while not isinstance(error, PeerLostError):
                    try:
                        self._take(await self._attempt.news.get())
                    except TransferError as other:
                        if other.cause is Cause.DIED or isinstance(other, PeerLostError):
                            other.computing, error = True, other
                            break
        return error

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        if self._call is not None:
            self._call.cancel()
        await self._node.inbox.close(self._attempt, sending=False)
        self._peer.trust.end(self._attempt.transfer_id)
        if not self._life.over:
            self._enter(DecodeState.FAILED)

    def _enter(self, state: DecodeState) -> None:
        if self._life.enter(state):
            current().event(state.value)

    # ---- news --------------------------------------------------------------------------------

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._take(await self._next())

    async def _next(self) -> object:
        """Raises ``TransferError`` when the state or the lease is overdue."""
        lease = self._peer.trust.left(self._attempt.transfer_id)
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(min(self._life.left, lease)):
                return await self._attempt.news.get()
        except TimeoutError:
            raise self._overdue() from None

    def _overdue(self) -> TransferError:
        address = self._peer.address
        if self._account is not None:
            missing = f"{address} says it is done, but not every byte arrived"
            return TransferError(missing, cause=Cause.INCOMPLETE)
        reason = self._life.overdue()
        if not reason:
            return TransferError(f"{address} has not renewed the lease", cause=Cause.LEASE)
        if self._life.request_over:
            return TransferError(f"{address}: {reason}", cause=Cause.TIMEOUT_TRANSFER)
        asked = self._life.state in (DecodeState.OPENING, DecodeState.RECEIVING)
        if asked and self._life.idle >= self._node.config.progress_timeout:
            opening = self._life.state is DecodeState.OPENING
            cause = Cause.TIMEOUT_OPEN if opening else Cause.TIMEOUT_PROGRESS
            return PeerLostError(f"{address} gives no sign of life: {reason}", cause=cause)
        greeting = self._life.state is DecodeState.RESERVED
        cause = Cause.TIMEOUT_GREET if greeting else Cause.TIMEOUT_TRANSFER
        return TransferError(f"{address}: {reason}", cause=cause)

    def _take(self, news: object) -> None:
        if isinstance(news, TransferError):
            raise news
        if isinstance(news, ReceiveFailed):
            raise TransferError(news.reason, cause=Cause(news.cause))
        if isinstance(news, Expecting):
            self._greeted += 1
        elif isinstance(news, Received):
            # The bytes may be faster than the word that they were coming.
            self._enter(DecodeState.RECEIVING)
            self._filled += 1
            self._bytes += news.bytes
        elif isinstance(news, pb.OpenEvent):
            self._hear(news)

    def _hear(self, event: pb.OpenEvent) -> None:
        self._enter(DecodeState.RECEIVING)
        self._life.progress()
        if event.HasField("failed"):
            self._peer_failed = True
            cause = Cause(event.failed.cause)
            raise TransferError(f"{self._peer.address}: {event.failed.reason}", cause=cause)
        if event.HasField("done"):
            if not math.isfinite(event.done.compute_seconds + event.done.exposed_seconds):
                raise TransferError(f"{self._peer.address}: its account makes no sense")
            self._account = event.done


async def _listen(call: Any, news: asyncio.Queue[object]) -> None:
    """The peer's words as news; its end as a ``TransferError``, unless it has said the outcome."""
    try:
        with calling():
            while (event := await call.read()) is not _END:
                news.put_nowait(event)
                if event.WhichOneof("event") in ("done", "failed"):
                    return
        ended = "the stream ended without an outcome"
        news.put_nowait(TransferError(ended, cause=Cause.PEER_FAILED))
    except TransferError as error:
        news.put_nowait(error)


# What ``read`` gives at the end of a stream; the stubs for grpc do not know it.
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
