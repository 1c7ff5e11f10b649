"""The prefill side of the handoff: accept, compute, stream, hold, release.

``Open`` is the whole life of one attempt on this side; everything else ends or prolongs it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillServicer
from ..shared.engine.plan import SamplingParams
from ..shared.engine.scheduler import StepOutput
from ..shared.engine.sequence import FinishReason, Sequence
from ..shared.errors import OverloadedError, RequestError, UnavailableError
from ..shared.handoff.inbox import Attempt, Inbox
from ..shared.handoff.messages import LayerReady, OpenSend, SendFailed, SendFinished
from ..shared.handoff.peer import CAPABILITIES, PROTOCOL_VERSION, refusal
from ..shared.node.engine import NodeEngine, NodeIdentity
from ..shared.node.metrics import NodeMetrics

log = logging.getLogger("tandem.prefill")

PULSE_SECONDS = 1.0
_PROGRESS = object()


@dataclass(eq=False)
class _Transfer:
    """One attempt that this node works on; ``task`` is the RPC that owns it."""

    request: pb.OpenRequest
    sequence: Sequence
    attempt: Attempt
    expires: float
    task: asyncio.Task[Any] | None
    wake: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    computed_at: float = 0.0


class PrefillService(PrefillServicer):
    """Serves ``tandem.v1.Prefill`` for one node. Owns the transfers; the engine owns the rest."""

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        inbox: Inbox,
        metrics: NodeMetrics,
        status: Callable[[], pb.StatusReply],
        *,
        lease_seconds: float,
        progress_timeout: float,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._inbox = inbox
        self._metrics = metrics
        self._status = status
        self._lease = lease_seconds
        self._progress = progress_timeout
        self._transfers: dict[int, _Transfer] = {}
        self.draining = False

    @property
    def live(self) -> int:
        """Transfers that still hold blocks."""
        return len(self._transfers)

    # ---- the life of one attempt -----------------------------------------------------------

    async def Open(
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.OpenEvent]:
        await self._check(request, context)
        engine, core = self._engine, self._engine.core
        sequence = Sequence(
            core.new_id(),
            list(request.prompt),
            SamplingParams(),
            priority=request.priority,
            salt=request.cache_salt,
            compute_until=request.end_token,
        )
        attempt = self._inbox.open(request.transfer_id, request.attempt, engine.world_size)
        transfer = _Transfer(
            request, sequence, attempt, time.monotonic() + self._lease, asyncio.current_task()
        )
        self._transfers[request.transfer_id] = transfer
        self._metrics.live_transfers.set(len(self._transfers))
        outcome = "cancelled"
        try:
            queued = core.scheduler.queued_prefill_tokens
            core.stream(
                sequence,
                (request.transfer_id, request.attempt),
                lambda: self._start_sending(transfer),
            )
            core.submit(sequence, lambda output: self._on_step(transfer, output))
            yield pb.OpenEvent(
                accepted=pb.OpenAccepted(queued_tokens=queued, lease_seconds=self._lease)
            )
            async for event in self._follow(transfer):
                outcome = event.WhichOneof("event") or outcome
                yield event
        except OverloadedError as error:
            outcome = "refused"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            outcome = "failed"
            yield _failed(f"the transfer took longer than {request.deadline_seconds:g} s")
        finally:
            self._metrics.transfers.labels(outcome).inc()
            # The blocks may be freed only when no rank reads them any more; the RPC's own
            # cancellation must not interrupt that.
            await asyncio.shield(asyncio.ensure_future(self._release(transfer)))

    async def _check(
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Refuse what cannot be started, with the status that tells the peer what to do."""
        code, reason = grpc.StatusCode.INVALID_ARGUMENT, ""
        if request.peer_epoch != self._identity.epoch:
            code = grpc.StatusCode.ABORTED
            reason = f"epoch {request.peer_epoch} is not this process ({self._identity.epoch})"
        elif self.draining:
            code, reason = grpc.StatusCode.UNAVAILABLE, "this node is draining"
        elif not request.first_token < request.end_token < len(request.prompt):
            reason = (
                f"tokens [{request.first_token}, {request.end_token}) of a prompt of "
                f"{len(request.prompt)}: the last token is never prefilled here"
            )
        elif max(request.prompt) >= self._engine.spec.vocab_size:
            reason = f"token {max(request.prompt)} is outside of the vocabulary"
        elif request.transfer_id in self._transfers:
            old = self._transfers[request.transfer_id].request.attempt
            if request.attempt <= old:
                code = grpc.StatusCode.ABORTED
                reason = f"attempt {request.attempt} is not newer than {old}"
            else:
                await self._cancel(request.transfer_id)
        if not reason:
            try:
                self._engine.core.admit(len(request.prompt), 0)
            except RequestError as error:
                reason = str(error)
            except OverloadedError as error:
                code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
            except UnavailableError as error:
                code, reason = grpc.StatusCode.UNAVAILABLE, str(error)
        if reason:
            await context.abort(code, reason)

    def _start_sending(self, transfer: _Transfer) -> None:
        """The blocks are known: tell the ranks, and that the cached prefix is ready now."""
        request, sequence = transfer.request, transfer.sequence
        for rank in range(self._engine.world_size):
            opening = OpenSend(
                transfer_id=request.transfer_id,
                attempt=request.attempt,
                peer_node=request.node_id,
                peer_epoch=request.epoch,
                peer_rank=rank,
                block_table=tuple(sequence.block_table),
                first_token=request.first_token,
                end_token=request.end_token,
                window_bytes=request.window_bytes,
                progress_seconds=self._progress,
            )
            self._inbox.command(transfer.attempt, rank, opening)
            if sequence.computed > request.first_token:
                ready = LayerReady(
                    transfer_id=request.transfer_id,
                    attempt=request.attempt,
                    first_layer=0,
                    end_layer=len(self._engine.spec.layers),
                    first_token=request.first_token,
                    end_token=sequence.computed,
                )
                self._inbox.command(transfer.attempt, rank, ready)

    def _on_step(self, transfer: _Transfer, output: StepOutput) -> None:
        if output.sequence.finish_reason is FinishReason.COMPUTED:
            transfer.computed_at = time.monotonic()
        transfer.wake.put_nowait(_PROGRESS)

    async def _follow(self, transfer: _Transfer) -> AsyncIterator[pb.OpenEvent]:
        """Progress until every rank's bytes are confirmed, or one of them failed."""
        request, sequence = transfer.request, transfer.sequence
        begun, sent, exposed, finished = time.monotonic(), 0, 0.0, 0
        forward = asyncio.create_task(_forward(transfer))
        try:
            async with asyncio.timeout(request.deadline_seconds or None):
                while finished < self._engine.world_size:
                    event = await _next_or_pulse(transfer)
                    if isinstance(event, SendFinished):
                        finished, sent = finished + 1, sent + event.bytes
                        exposed = max(exposed, event.exposed_seconds)
                    elif isinstance(event, SendFailed):
                        yield _failed(event.reason)
                        return
                    elif sequence.finish_reason is FinishReason.ERROR:
                        yield _failed(sequence.error)
                        return
                    elif event is _PROGRESS:
                        yield pb.OpenEvent(
                            progress=pb.OpenProgress(computed_tokens=sequence.computed)
                        )
        finally:
            forward.cancel()
        self._metrics.transfer_bytes.inc(sent)
        self._metrics.transfer_seconds.observe(time.monotonic() - begun)
        self._metrics.exposed_seconds.observe(exposed)
        yield pb.OpenEvent(
            done=pb.OpenDone(
                bytes=sent, compute_seconds=transfer.computed_at - begun, exposed_seconds=exposed
            )
        )

    async def _release(self, transfer: _Transfer) -> None:
        core = self._engine.core
        await self._inbox.close(transfer.attempt, sending=True)
        core.unstream(transfer.sequence)
        core.cancel(transfer.sequence)
        core.scheduler.release_held(transfer.sequence)
        core.wake()
        if self._transfers.get(transfer.request.transfer_id) is transfer:
            del self._transfers[transfer.request.transfer_id]
        self._metrics.live_transfers.set(len(self._transfers))

    async def _cancel(self, transfer_id: int) -> bool:
        """End an attempt and wait until its blocks are free. Unknown ids are nobody's fault."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        if transfer.task is not None:
            transfer.task.cancel()
            await asyncio.wait([transfer.task], timeout=self._lease)
        return True

    # ---- everything else -------------------------------------------------------------------

    async def Hello(
        self, request: pb.HelloRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HelloReply:
        engine = self._engine
        mine = pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            capabilities=CAPABILITIES,
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            fingerprint=engine.fingerprint,
            tensor_parallel_size=engine.world_size,
            block_size=engine.resolved.block_size,
            kv_dtype=engine.kv_dtype,
            ranks=[
                pb.RankEndpoint(rank=rank, bulk=bulk, control=control)
                for rank, (bulk, control) in enumerate(engine.endpoints)
            ],
        )
        reason = refusal(request, mine)
        if reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return mine

    async def Cancel(
        self, request: pb.TransferIds, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        ended = [key for key in self._of(request) if await self._cancel(key)]
        return pb.TransferIds(ids=ended)

    async def Release(
        self, request: pb.TransferIds, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        return await self.Cancel(request, context)

    async def Renew(
        self, request: pb.TransferIds, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        held = self._of(request)
        for key in held:
            self._transfers[key].expires = time.monotonic() + self._lease
        return pb.TransferIds(ids=held)

    async def Live(
        self, request: pb.LiveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        return pb.TransferIds(
            ids=[
                key
                for key, transfer in self._transfers.items()
                if transfer.request.node_id == request.node_id
                and transfer.request.epoch == request.epoch
            ]
        )

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatusReply:
        return self._status()

    async def expire_leases(self) -> None:
        """Runs for ever: frees what a vanished decode node does not renew."""
        while True:
            await asyncio.sleep(self._lease / 10)
            now = time.monotonic()
            for key in [k for k, t in self._transfers.items() if t.expires < now]:
                log.warning("transfer %d was not renewed: released", key)
                await self._cancel(key)

    def _of(self, request: pb.TransferIds) -> list[int]:
        """Those ids that this very peer opened: nobody ends another's transfer."""
        return [
            key
            for key in request.ids
            if key in self._transfers
            and self._transfers[key].request.node_id == request.node_id
            and self._transfers[key].request.epoch == request.epoch
        ]


async def _next_or_pulse(transfer: _Transfer) -> Any:
    """The next event, or a sign of life: a queue or a long chunk is silent, a dead node too."""
    try:
        return await asyncio.wait_for(transfer.wake.get(), PULSE_SECONDS)
    except TimeoutError:
        return _PROGRESS


async def _forward(transfer: _Transfer) -> None:
    while True:
        _, event = await transfer.attempt.events.get()
        transfer.wake.put_nowait(event)


def _failed(reason: str) -> pb.OpenEvent:
    return pb.OpenEvent(failed=pb.OpenFailed(reason=reason, retriable=True))
