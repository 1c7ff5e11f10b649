"""The decode side of the handoff: it reserves, opens, checks, commits, and owns the outcome.

``Transfers.prefill_remotely`` is the whole life of a transfer on this side::

    reserved ─► opening ─► receiving ─► committed
                   └──────────┴─► failed: next candidate as attempt n+1, then local prefill

No token reaches the client before the commit, so none of this can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..shared.config import HandoffConfig
from ..shared.engine.sequence import Sequence
from ..shared.errors import PeerRefusedError, TransferError
from ..shared.handoff.inbox import Attempt, Inbox
from ..shared.handoff.messages import Expect, Expecting, Received, ReceiveFailed
from ..shared.node.engine import NodeEngine, NodeIdentity
from ..shared.node.metrics import NodeMetrics
from .peers import Peer, Peers

log = logging.getLogger("tandem.decode")

# Until rates are measured: below this, a round trip costs more than it saves.
DEFAULT_THRESHOLD = 64
GREET_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a prompt's KV came from. ``node`` is empty for local prefill, with the reason why."""

    node: str = ""
    reason: str = ""


class Transfers:
    """Opens transfers for sequences and settles each one exactly once."""

    def __init__(
        self,
        engine: NodeEngine,
        identity: NodeIdentity,
        inbox: Inbox,
        peers: Peers,
        metrics: NodeMetrics,
        config: HandoffConfig,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._inbox = inbox
        self._peers = peers
        self._metrics = metrics
        self._config = config
        self._live = 0

    @property
    def live(self) -> int:
        return self._live

    def threshold(self) -> int:
        """Uncached tokens from which a transfer is worth its overhead.

        The fixed cost of a transfer, in tokens that this node could prefill meanwhile.
        """
        if self._config.prefill_threshold is not None:
            return self._config.prefill_threshold
        rate = self._engine.core.prefill_tokens_per_second
        return max(DEFAULT_THRESHOLD, int(rate * 0.02)) if rate else DEFAULT_THRESHOLD

    async def prefill_remotely(
        self, sequence: Sequence, candidates: list[pb.PrefillCandidate]
    ) -> Outcome:
        """Fill a new sequence's prompt from a prefill node, or queue it for local prefill.

        Either way the sequence is scheduled on return. When cancelled, the sequence is finished
        and its blocks are free.
        """
        core = self._engine.core
        end = len(sequence.prompt) - 1
        core.scheduler.match_prefix(sequence)
        reason = self._why_local(sequence, candidates)
        reserved = core.reserve(sequence, end) if not reason else None
        if reserved is None:
            return self._locally(sequence, reason or "no free blocks")
        transfer_id = secrets.randbits(63)
        self._live += 1
        self._metrics.live_transfers.set(self._live)
        try:
            for number, candidate in enumerate(candidates):
                try:
                    await self._attempt(sequence, transfer_id, number, candidate)
                except TransferError as error:
                    reason = str(error)
                    log.warning("transfer %d attempt %d: %s", transfer_id, number, error)
                    continue
                core.scheduler.commit_received(sequence, reserved, end)
                core.wake()
                return Outcome(node=candidate.node_id)
        except BaseException:
            core.scheduler.cancel_received(sequence, reserved)
            core.wake()
            raise
        finally:
            self._live -= 1
            self._metrics.live_transfers.set(self._live)
        core.scheduler.abandon_received(sequence, reserved)
        core.wake()
        self._metrics.local_prefills.labels("transfer failed").inc()
        return Outcome(reason=reason)

    def _why_local(self, sequence: Sequence, candidates: list[pb.PrefillCandidate]) -> str:
        missing = len(sequence.prompt) - 1 - sequence.computed
        if not candidates:
            return "no prefill node"
        if sequence.params.prompt_logprobs is not None:
            return "prompt logprobs"  # they need every position's logits here
        if missing < self.threshold():
            return "below threshold"
        return ""

    def _locally(self, sequence: Sequence, reason: str) -> Outcome:
        self._metrics.local_prefills.labels(reason).inc()
        self._engine.core.scheduler.enqueue(sequence)
        self._engine.core.wake()
        return Outcome(reason=reason)

    async def _attempt(
        self, sequence: Sequence, transfer_id: int, number: int, candidate: pb.PrefillCandidate
    ) -> None:
        """One try with one node. On return every block is filled and checked; on any exception no
        rank writes them any more."""
        begun, outcome = time.monotonic(), "failed"
        attempt = self._inbox.open(transfer_id, number, self._engine.world_size)
        peer: Peer | None = None
        try:
            async with asyncio.timeout(self._config.transfer_timeout):
                peer = await self._peers.meet(candidate)
                peer.live.add(transfer_id)
                await self._receive(sequence, peer, attempt)
            outcome = "committed"
        except PeerRefusedError:
            outcome = "refused"
            raise
        except TimeoutError:
            raise TransferError(
                f"{candidate.address} did not finish within {self._config.transfer_timeout:g} s"
            ) from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            await asyncio.shield(asyncio.ensure_future(self._inbox.close(attempt, sending=False)))
            if peer is not None:
                peer.live.discard(transfer_id)
            self._metrics.transfers.labels(outcome).inc()
        self._metrics.transfer_seconds.observe(time.monotonic() - begun)

    async def _receive(self, sequence: Sequence, peer: Peer, attempt: Attempt) -> None:
        if len(peer.endpoints) != self._engine.world_size:
            raise PeerRefusedError(f"{peer.address} has {len(peer.endpoints)} ranks")
        for rank in range(self._engine.world_size):
            self._expect(sequence, peer, attempt, rank)
        await self._greeted(attempt)
        try:
            call = peer.stub.Open(self._open_request(sequence, peer, attempt))
        except grpc.aio.UsageError:
            raise TransferError(f"{peer.address}: the connection was closed") from None
        watch = asyncio.create_task(_watch(call, self._config.progress_timeout))
        collect = asyncio.create_task(self._collect(attempt))
        try:
            done, _ = await asyncio.wait({watch, collect}, return_when=asyncio.FIRST_COMPLETED)
            if collect not in done:
                await self._after_rpc(peer, watch, collect)
            self._metrics.transfer_bytes.inc(collect.result())
            # The bytes are here and checked. What the peer still says is for the records.
            with contextlib.suppress(TransferError, TimeoutError):
                said = await asyncio.wait_for(watch, 1.0)
                self._metrics.exposed_seconds.observe(said.exposed_seconds)
        finally:
            for task in (watch, collect):
                task.cancel()
            await asyncio.gather(watch, collect, return_exceptions=True)
            call.cancel()

    async def _after_rpc(
        self, peer: Peer, watch: asyncio.Task[pb.OpenDone], collect: asyncio.Task[int]
    ) -> None:
        """The RPC ended before the ranks confirmed: when it failed the attempt is over, when it is
        done the last frames' verdict is only a moment away."""
        try:
            watch.result()
        except TransferError:
            if not isinstance(watch.exception(), PeerRefusedError):
                await self._peers.forget(peer)
            raise
        try:
            await asyncio.wait_for(asyncio.shield(collect), self._config.progress_timeout)
        except TimeoutError:
            raise TransferError(
                f"{peer.address} says it is done, but not every byte arrived"
            ) from None

    def _expect(self, sequence: Sequence, peer: Peer, attempt: Attempt, rank: int) -> None:
        bulk, control = peer.endpoints[rank]
        self._inbox.command(
            attempt,
            rank,
            Expect(
                transfer_id=attempt.transfer_id,
                attempt=attempt.attempt,
                peer_node=peer.node_id,
                peer_epoch=peer.epoch,
                peer_rank=rank,
                bulk=bulk,
                control=control,
                block_table=tuple(sequence.block_table),
                first_token=sequence.computed,
                end_token=len(sequence.prompt) - 1,
                window_bytes=self._config.window_bytes,
                deadline_seconds=self._config.transfer_timeout,
                # A chunk may compute for a while between frames; the control plane notices sooner
                # when the node itself is gone.
                progress_seconds=5 * self._config.progress_timeout,
            ),
        )

    async def _greeted(self, attempt: Attempt) -> None:
        waiting = attempt.ranks
        try:
            async with asyncio.timeout(GREET_SECONDS):
                while waiting:
                    _, event = await attempt.events.get()
                    if isinstance(event, Expecting):
                        waiting -= 1
                    elif isinstance(event, ReceiveFailed):
                        raise TransferError(event.reason)
        except TimeoutError:
            raise TransferError(f"the data plane was not greeted in {GREET_SECONDS:g} s") from None

    async def _collect(self, attempt: Attempt) -> int:
        """Until every rank has every byte. Returns how many."""
        total, waiting = 0, attempt.ranks
        while waiting:
            _, event = await attempt.events.get()
            if isinstance(event, Received):
                waiting, total = waiting - 1, total + event.bytes
            elif isinstance(event, ReceiveFailed):
                raise TransferError(event.reason)
        return total

    def _open_request(self, sequence: Sequence, peer: Peer, attempt: Attempt) -> pb.OpenRequest:
        return pb.OpenRequest(
            transfer_id=attempt.transfer_id,
            attempt=attempt.attempt,
            node_id=self._identity.node_id,
            epoch=self._identity.epoch,
            peer_epoch=peer.epoch,
            prompt=sequence.prompt,
            first_token=sequence.computed,
            end_token=len(sequence.prompt) - 1,
            priority=sequence.priority,
            cache_salt=sequence.salt,
            deadline_seconds=self._config.transfer_timeout,
            window_bytes=self._config.window_bytes,
        )


async def _watch(call: Any, silence: float) -> pb.OpenDone:
    """The peer's own account. Raises ``TransferError`` when it failed, vanished, or said nothing
    for ``silence`` seconds (it pulses once a second)."""
    try:
        while True:
            event = await asyncio.wait_for(call.read(), silence)
            if event is _END:
                raise TransferError("the stream ended without an outcome")
            kind = event.WhichOneof("event")
            if kind == "done":
                return event.done
            if kind == "failed":
                raise TransferError(event.failed.reason)
    except TimeoutError:
        raise TransferError(f"no sign of life for {silence:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise TransferError(f"{error.code().name}: {error.details()}") from None
    except asyncio.CancelledError:
        # Another transfer found the peer dead and closed the channel under this one.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransferError("the connection was closed") from None


# What ``read`` gives at the end of a stream; the stubs for grpc do not know it.
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
