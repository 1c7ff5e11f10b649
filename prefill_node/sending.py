"""The sending side of one attempt: its sequence, its state, and its messages to the peer.

``Sending.events`` goes through all states, from the queue to the last confirmed byte; ``close``
releases the blocks, whatever happened before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ..proto import tandem_pb2 as pb
from ..shared.causes import Cause
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.engine.start import NodeEngine
from ..shared.engine.work import Compute
from ..shared.errors import TransferError, UnavailableError
from ..shared.handoff.inbox import Inbox
from ..shared.handoff.plane.messages import LayerReady, OpenSend, SendFailed, SendFinished
from ..shared.handoff.transfer import PrefillState, prefill_transfer_state
from ..shared.handoff.wire.head_parts import parts_of
from ..shared.handoff.wire.layer_windows import first_tokens
from .transfer_spans import TransferSpans

# Interval of messages to the decode node. Without them a queue or a long chunk would look like a
# dead node.
HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    """The engine computed a chunk; ``finished`` is set with the last one."""

    finished: FinishReason | None


class Sending:
    """One attempt of a peer; ``task`` is the RPC that owns it."""

    def __init__(
        self,
        request: pb.OpenRequest,
        engine: NodeEngine,
        inbox: Inbox,
        *,
        request_seconds: float,
        still_seconds: float,
        progress_seconds: float,
    ) -> None:
        self.request = request
        self.task = asyncio.current_task()
        self.cancel_cause: Cause | None = None
        self._engine = engine
        self._inbox = inbox
        self._progress_seconds = progress_seconds
        self._sequence = Sequence(
            engine.core.new_id(),
            list(request.prompt),
            Compute(request.end_token, request.private),
            priority=request.priority,
            salt=request.cache_salt,
            mid_stream=request.mid_stream,
        )
        self._transfer = prefill_transfer_state(
            f"transfer {request.transfer_id} attempt {request.attempt}",
            request_seconds=request_seconds,
            still_seconds=still_seconds,
            clock=time.monotonic,
        )
        self._attempt = inbox.open(request.transfer_id, request.attempt)
        here, there = engine.kv_heads(engine.world_size), engine.kv_heads(request.ranks)
        self._parts = parts_of(there, here)
        self._started_at = self._computed_at = 0.0
        self._confirmed = 0
        self._bytes = 0
        self._exposed = 0.0
        self._spans = TransferSpans()

    @property
    def state(self) -> PrefillState:
        return self._transfer.state

    @property
    def held_blocks(self) -> list[int]:
        """Computed blocks that wait for the peer."""
        return self._sequence.block_table if self.state is PrefillState.HELD else []

    def start(self) -> int:
        """Queue the sequence; returns the tokens ahead of it. Raises ``OverloadedError``."""
        core = self._engine.core
        queued = core.load().queued_prefill_tokens
        key = (self.request.transfer_id, self.request.attempt)
        core.send_kv(self._sequence, key, self._start_sending)
        self._spans.queued(queued)
        core.submit(self._sequence, self._on_step)
        return queued

    async def events(self) -> AsyncIterator[pb.OpenEvent]:
        """Progress messages until every rank's bytes are confirmed and the last step has ended,
        which may still fail, then the outcome. Raises ``TransferError``."""
        while self._confirmed < len(self._parts) or self.state is not PrefillState.HELD:
            event = await self._next()
            if isinstance(event, SendFailed):
                raise TransferError(event.reason, cause=Cause(event.cause))
            if isinstance(event, SendFinished):
                self._count(event)
            elif isinstance(event, _Step):
                self._computed(event)
            computed = pb.OpenProgress(computed_tokens=self._sequence.computed)
            yield pb.OpenEvent(progress=computed)
        self._spans.confirmed(self._bytes, self._exposed)
        yield pb.OpenEvent(
            done=pb.OpenDone(
                bytes=self._bytes,
                compute_seconds=self._compute_seconds,
                exposed_seconds=self._exposed,
                cached_tokens=self._sequence.cached,
            )
        )

    @property
    def _compute_seconds(self) -> float:
        # The last bytes may be confirmed before the step that computed them has ended.
        return (self._computed_at or time.monotonic()) - self._started_at

    async def close(self) -> None:
        """Return once no rank reads the blocks any longer and they are free."""
        core = self._engine.core
        await self._inbox.close(self._attempt, sending=True)
        core.stop_sending_kv(self._sequence)
        core.cancel(self._sequence)
        core.release_blocks(self._sequence)
        self._transfer.enter(PrefillState.RELEASED)
        self._spans.close()

    async def _next(self) -> object:
        """The next event, or ``None`` when a heartbeat is due."""
        if self._engine.core.stepping:
            # A step for this prompt, or for one ahead of it, may take half an hour; the watchdog
            # ends one that hangs.
            self._transfer.progress()
        seconds = min(HEARTBEAT_SECONDS, self._transfer.remaining)
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(seconds):
                return await self._attempt.events.get()
        except TimeoutError:
            overdue = self._transfer.overdue()
            if overdue:
                raise TransferError(overdue, cause=Cause.TIMEOUT_TRANSFER) from None
            return None

    def _start_sending(self) -> None:
        """Open the transfer on the ranks, and send the cached prefix."""
        request, sequence = self.request, self._sequence
        self._started_at = time.monotonic()
        self._transfer.enter(PrefillState.RUNNING)
        firsts = first_tokens(
            self._engine.spec, request.first_token, request.end_token, request.resume_at
        )
        self._spans.started(sequence.computed)
        for part in self._parts:
            opening = OpenSend(
                transfer_id=request.transfer_id,
                attempt=request.attempt,
                peer_node=request.node_id,
                peer_epoch=request.epoch,
                peer_rank=part.receiver,
                block_table=tuple(sequence.block_table),
                first_token=request.first_token,
                end_token=request.end_token,
                heads=part.heads,
                dtype=request.kv_dtype,
                first_tokens=firsts,
                window_bytes=request.window_bytes,
                progress_seconds=self._progress_seconds,
            )
            self._inbox.command(self._attempt, part.sender, opening)
        if sequence.computed > request.first_token:
            ready = LayerReady(
                transfer_id=request.transfer_id,
                attempt=request.attempt,
                first_layer=0,
                end_layer=len(self._engine.spec.memories),
                first_token=request.first_token,
                end_token=sequence.computed,
            )
            for rank in self._attempt.busy_ranks:
                self._inbox.command(self._attempt, rank, ready)

    def _on_step(self, output: StepOutput) -> None:
        if output.finish_reason is FinishReason.COMPUTED:
            self._computed_at = time.monotonic()
            self._spans.computed()
        self._attempt.events.put_nowait(_Step(output.finish_reason))

    def _computed(self, step: _Step) -> None:
        if step.finished is FinishReason.ERROR:
            raise TransferError(self._sequence.error, cause=self._failure_cause())
        self._transfer.enter(PrefillState.STREAMING)
        self._transfer.progress()
        if step.finished is FinishReason.COMPUTED:
            self._transfer.enter(PrefillState.HELD)

    def _failure_cause(self) -> Cause:
        try:
            self._engine.core.check_ranks()
        except UnavailableError:
            return Cause.DIED
        return Cause.COMPUTE

    def _count(self, event: SendFinished) -> None:
        self._confirmed += 1
        self._bytes += event.bytes
        self._exposed = max(self._exposed, event.exposed_seconds)
