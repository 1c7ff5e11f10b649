"""``tandem.v1.Prefill``: admission of transfers, and their leases.

``Open`` lasts as long as its attempt on this side; ``Release`` and ``Renew`` end or prolong it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import PrefillServicer
from ..shared.causes import Cause
from ..shared.config import HandoffConfig
from ..shared.engine.start import NodeEngine, NodeIdentity
from ..shared.errors import (
    NODE_DRAINING,
    OverloadedError,
    PeerRefusedError,
    RequestError,
    TandemError,
    TransferError,
    UnavailableError,
)
from ..shared.handoff.carriers.zeromq.curve import check_keys
from ..shared.handoff.inbox import Inbox
from ..shared.handoff.lease import LeaseTable, Tenant
from ..shared.kv.layout import check_kv_dtype
from ..shared.node.introduction import introduction, refusal
from ..shared.node.metrics import NodeMetrics
from ..shared.node.rpc_context import rpc_context_of, serving_rpc
from ..shared.node.transfer_metrics import AttemptRecord
from ..shared.process.tasks import uninterrupted
from ..shared.telemetry.logs import add_log_context
from ..shared.telemetry.tracing import NO_TRACER, Tracer
from .admitted_peers import AdmittedPeers
from .sending import Sending

log = logging.getLogger("tandem.prefill")

# Used if a peer does not send the deadline of its request.
DEFAULT_REQUEST_SECONDS = 3600.0
# Several times the length of this version's canary.
MAX_CANARY_TOKENS = 128


class StaleEpochError(TandemError):
    """The request is for an earlier process at this address."""


class PrefillService(PrefillServicer):
    """Owns the transfers of one node and their leases."""

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        inbox: Inbox,
        metrics: NodeMetrics,
        status: Callable[[], pb.StatusReply],
        config: HandoffConfig,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._inbox = inbox
        self._metrics = metrics
        self._status = status
        self._config = config
        self._tracer = tracer
        self._leases = LeaseTable(config.lease_seconds, time.monotonic)
        metrics.count_leases = lambda: len(self._leases)
        self._admitted = AdmittedPeers(
            inbox, engine.world_size, time.monotonic, max_peers=config.max_peers
        )
        self._sending: dict[int, Sending] = {}
        self.draining = False

    @property
    def live(self) -> int:
        """Number of transfers that still hold blocks."""
        return len(self._sending)

    # ---- one attempt -----------------------------------------------------------------------

    async def Open(
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.OpenEvent]:
        add_log_context(transfer_id=str(request.transfer_id), attempt=str(request.attempt + 1))
        with serving_rpc(
            self._tracer,
            "Prefill.Open",
            rpc_context_of(context),
            node=self._identity.node_id,
            transfer_id=str(request.transfer_id),
            attempt=request.attempt + 1,
            tokens=request.end_token - request.first_token,
        ):
            async with aclosing(self._attempt(request, context)) as events:
                async for event in events:
                    yield event

    async def _attempt(
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.OpenEvent, None]:
        await self._admit(request, context)
        sending = self._accept(request)
        record = AttemptRecord(request.attempt)
        try:
            yield pb.OpenEvent(accepted=pb.OpenAccepted(queued_tokens=sending.start()))
            async for event in sending.events():
                if event.HasField("done"):
                    record.succeeded("done", event.done.bytes, event.done.exposed_seconds)
                yield event
        except OverloadedError as error:
            record.failed(error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TransferError as error:
            record.failed(error)
            reason = f"{sending.state.value}: {error}"
            yield pb.OpenEvent(failed=pb.OpenFailed(reason=reason, cause=error.cause.value))
        except BaseException as error:
            record.failed(error, sending.cancel_cause)
            raise
        finally:
            self._record(record, request)
            # Blocks are freed only when no rank reads them any longer; a cancellation of the RPC
            # must not interrupt that.
            await uninterrupted(self._end(sending))

    async def _admit(
        self, request: pb.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Abort a request that cannot be started, with a status that tells the peer what to do."""
        try:
            self._check(request)
            if request.transfer_id in self._sending:
                await self._cancel([request.transfer_id], Cause.SUPERSEDED)
                self._check(request)
            if request.transfer_id in self._sending:
                raise OverloadedError(
                    f"the attempt before {request.attempt} still holds its blocks"
                )
            return
        except StaleEpochError as error:
            status, details = grpc.StatusCode.ABORTED, str(error)
        except (RequestError, PeerRefusedError) as error:
            status, details = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except OverloadedError as error:
            status, details = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        except UnavailableError as error:
            status, details = grpc.StatusCode.UNAVAILABLE, str(error)
        await context.abort(status, details)

    def _check(self, request: pb.OpenRequest) -> None:
        """Raise the error of a request that cannot be started now."""
        if request.peer_epoch != self._identity.epoch:
            raise StaleEpochError(
                f"epoch {request.peer_epoch} is not this process ({self._identity.epoch})"
            )
        if self.draining:
            raise OverloadedError(NODE_DRAINING)
        _check_fields(request, self._engine)
        self._check_order(request)
        goes_first = request.private or request.mid_stream
        self._engine.core.admit(len(request.prompt), 0, goes_first=goes_first)
        unsent = self._unsent_blocks(_tenant(request))
        free = self._engine.core.load().blocks.available
        if unsent > free:
            raise OverloadedError(
                f"peer has {unsent} unsent blocks, more than the {free} free ones; retry later"
            )

    def _check_order(self, request: pb.OpenRequest) -> None:
        """Raise ``RequestError`` for an attempt that may not replace the current one."""
        old = self._sending.get(request.transfer_id)
        if old is None:
            return
        if _tenant(old.request) != _tenant(request):
            raise RequestError(f"transfer {request.transfer_id} belongs to another node")
        if old.request.attempt >= request.attempt:
            raise RequestError(f"attempt {request.attempt} is not newer than {old.request.attempt}")

    def _unsent_blocks(self, tenant: Tenant) -> int:
        """Number of computed blocks that wait for one peer.

        They must not exceed the free ones, so that a peer on a slow link leaves room for others;
        its further prompts are computed sooner elsewhere.
        """
        own = (s for s in self._sending.values() if _tenant(s.request) == tenant)
        return len({block for sending in own for block in sending.held_blocks})

    def _accept(self, request: pb.OpenRequest) -> Sending:
        granted = self._leases.grant(_tenant(request), request.transfer_id, request.attempt)
        assert granted, "_check_order has checked it"
        sending = Sending(
            request,
            self._engine,
            self._inbox,
            request_seconds=request.deadline_seconds or DEFAULT_REQUEST_SECONDS,
            still_seconds=self._config.transfer_timeout,
            progress_seconds=self._config.progress_timeout,
        )
        self._sending[request.transfer_id] = sending
        self._metrics.live_transfers.set(len(self._sending))
        return sending

    async def _end(self, sending: Sending) -> None:
        request = sending.request
        await sending.close()
        del self._sending[request.transfer_id]
        self._leases.release(_tenant(request), [request.transfer_id])
        self._metrics.live_transfers.set(len(self._sending))

    def _record(self, record: AttemptRecord, request: pb.OpenRequest) -> None:
        if not request.private:
            peer = _tenant(request)
            record.carrier = self._inbox.connections.carrier(peer.node_id, peer.epoch)
            self._metrics.transfers.count(record)

    async def _cancel(self, transfer_ids: Iterable[int], cause: Cause) -> None:
        """End attempts and wait until their blocks are free."""
        attempts = [self._sending[i] for i in transfer_ids if i in self._sending]
        for sending in attempts:
            sending.cancel_cause = cause
        tasks = {sending.task for sending in attempts if sending.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._leases.lease_seconds)

    # ---- greetings and leases --------------------------------------------------------------

    async def Hello(
        self, request: pb.Introduction, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HelloReply:
        mine = introduction(self._engine, self._identity)
        reason = refusal(request, mine)
        if reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        await self._admit_planes(request, context)
        await self._cancel(self._leases.void(_tenant(request)), Cause.PEER_LOST)
        return pb.HelloReply(
            node=mine,
            ranks=[
                pb.RankEndpoint(rank=rank, bulk=bulk, control=control)
                for rank, (bulk, control) in enumerate(self._endpoints())
            ],
            lease_seconds=self._leases.lease_seconds,
        )

    def _endpoints(self) -> list[tuple[str, str]]:
        """The ranks' endpoints as decode nodes reach them; ``--kv-advertise`` takes precedence."""
        return [
            self._config.kv_advertised(rank) or (bulk, control)
            for rank, (bulk, control) in enumerate(self._engine.endpoints)
        ]

    async def _admit_planes(
        self, request: pb.Introduction, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Check a decode node's ranks, and admit their keys if this node uses CURVE."""
        ranks = request.tensor_parallel_size if self._engine.curve_keys else 0
        try:
            self._engine.kv_heads(request.tensor_parallel_size)  # bounded by the model
            check_keys(request.curve_keys, ranks, request.node_id)
            if ranks:
                await self._admitted.admit(_tenant(request), request.curve_keys)
        except PeerRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (OverloadedError, TransferError) as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def Release(
        self, request: pb.TransferIds, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        ids = self._leases.release(_tenant(request), request.ids)
        await self._cancel(ids, Cause.CANCELLED)
        return pb.TransferIds(ids=ids)

    async def Renew(
        self, request: pb.TransferIds, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        return pb.TransferIds(ids=self._leases.renew(_tenant(request), request.ids))

    async def Live(
        self, request: pb.LiveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TransferIds:
        tenant = _tenant(request)
        admitted = not self._engine.curve_keys or self._admitted.note_alive(tenant)
        return pb.TransferIds(ids=self._leases.live(tenant), greet_again=not admitted)

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StatusReply:
        reply = self._status()
        if not request.without_metrics:
            reply.metrics.extend(self._metrics.samples())
        reply.prefixes.MergeFrom(self._metrics.prefixes(request.prefix_version) or pb.Prefixes())
        return reply

    async def expire_leases(self) -> None:
        """End transfers whose leases are not renewed, until cancelled."""
        while True:
            await asyncio.sleep(self._leases.lease_seconds / 10)
            for name in self._admitted.remove_silent():
                log.info("%s is gone: its keys no longer open the data plane", name)
            expired = self._leases.expire()
            if expired:
                log.warning("leases of transfers %s were not renewed: released", expired)
                await self._cancel(expired, Cause.LEASE)


def _check_fields(request: pb.OpenRequest, engine: NodeEngine) -> None:
    """Raise ``RequestError`` for invalid values, and ``PeerRefusedError`` for a peer whose KV heads
    or dtype do not fit this node's."""
    if not request.first_token < request.end_token < len(request.prompt):
        raise RequestError(
            f"tokens [{request.first_token}, {request.end_token}) of a prompt of "
            f"{len(request.prompt)} tokens: the last one is never prefilled here"
        )
    if request.resume_at > request.end_token:
        raise RequestError(
            f"resuming at token {request.resume_at} leaves a gap after {request.end_token}"
        )
    if request.private and len(request.prompt) > MAX_CANARY_TOKENS:
        raise RequestError(
            f"a private prompt of {len(request.prompt)} tokens: it goes ahead of all others, so it "
            f"may have at most {MAX_CANARY_TOKENS}"
        )
    if not request.deadline_seconds >= 0:  # also rejects NaN
        raise RequestError(
            f"deadline_seconds is {request.deadline_seconds}; it must not be negative"
        )
    check_kv_dtype(request.kv_dtype)
    engine.kv_heads(request.ranks)
    if max(request.prompt) >= engine.spec.vocab_size:
        raise RequestError(f"token {max(request.prompt)} is outside the vocabulary")


def _tenant(
    request: pb.OpenRequest | pb.Introduction | pb.TransferIds | pb.LiveRequest,
) -> Tenant:
    return Tenant(request.node_id, request.epoch)
