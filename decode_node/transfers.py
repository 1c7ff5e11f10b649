"""The KV of a prompt: reserve blocks, try the prefill nodes in turn, else prefill here.

``receiving.py`` runs each attempt; this module owns the reservation and the result. No token
reaches the client before the commit, so clients do not notice failed attempts.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..proto import tandem_pb2 as pb
from ..shared.causes import Cause
from ..shared.config.limits import MAX_PEERS
from ..shared.engine.reception import Reception
from ..shared.engine.sequence import Sequence
from ..shared.errors import TransferError
from ..shared.node.metrics import NodeMetrics
from ..shared.telemetry.logs import log_context
from ..shared.telemetry.prefill_origin import LOCAL, REMOTE, LocalReason, failed
from ..shared.telemetry.tracing import step
from .estimate import LocalEstimate, RemoteEstimate, why_local
from .first_token import FirstTokenClock
from .peering.link import MeasuredLink
from .peering.peer import Peer, PeerLostError
from .peering.peers import Peers
from .peering.prefill_backoff import SILENCE, BackedOffError
from .prompt_deaths import PromptDeaths
from .receiving import ReceivingNode, TransferResult

log = logging.getLogger("tandem.decode")

# An attempt that fails sooner delays a request too little to back off from the node.
SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PrefillSource:
    """The node that computed a prompt's KV.

    ``node`` is empty for local prefill, whose ``reason`` is from
    ``shared/telemetry/prefill_origin.py``. ``cached`` counts the received tokens that were in the
    prefill node's prefix index.
    """

    node: str = ""
    reason: str = ""
    cached: int = 0
    clock: FirstTokenClock = field(default_factory=FirstTokenClock, compare=False)


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """A prompt whose KV is being received."""

    reception: Reception
    deadline: float  # by the monotonic clock
    deaths: PromptDeaths
    transfer_id: int
    clock: FirstTokenClock
    failure: str = ""  # of the last attempt

    @property
    def remaining_seconds(self) -> float:
        return self.deadline - time.monotonic()


class Transfers:
    """Receives prompts' KV; commits, abandons or cancels each reception."""

    def __init__(self, node: ReceivingNode, peers: Peers, metrics: NodeMetrics) -> None:
        self._node = node
        self._engine = node.engine
        self._config = node.config
        self._peers = peers
        self._metrics = metrics
        self._live = 0
        # The failure logged last for each address, until a transfer succeeds.
        self._failing: dict[str, tuple[int, Cause]] = {}

    async def prefill_remotely(
        self,
        sequence: Sequence,
        candidates: list[pb.PrefillCandidate],
        deadline: float,
        deaths: PromptDeaths,
    ) -> PrefillSource:
        """Fill a new sequence's prompt from a prefill node, or queue it for local prefill.

        ``deadline`` is the request's, by the monotonic clock. On return the sequence is scheduled.
        If this is cancelled, or raises ``GivenUpError`` because too many processes died with this
        prompt, the sequence is finished and its blocks are free.
        """
        core, clock = self._engine.core, FirstTokenClock()
        end = len(sequence.prompt) - 1
        core.match_prefix(sequence)
        _, reason = self._choose(sequence, candidates, deadline)
        if reason:
            core.enqueue(sequence)
            return self._local(reason, clock)
        reception = await core.reserve_in_turn(sequence, end)
        clock.reserved()
        # The choice may have changed during the wait.
        usable, reason = self._choose(sequence, candidates, deadline)
        prompt = _Prompt(
            reception=reception,
            deadline=deadline,
            deaths=deaths,
            transfer_id=secrets.randbits(63),
            clock=clock,
        )
        try:
            with self._count_live():
                for number, candidate in enumerate(usable):
                    result = await self._try(prompt, number, candidate)
                    if result is not None:
                        reception.commit(result.end, result.whole_from)
                        if not sequence.received:
                            return self._local(LocalReason.NOTHING_MISSING, clock)
                        self._metrics.prompts.count(REMOTE)
                        cached = _cached(result.done, sequence)
                        return PrefillSource(candidate.node_id, cached=cached, clock=clock)
        except BaseException:
            reception.cancel()
            raise
        reception.abandon()
        return self._local(prompt.failure or reason, clock)

    @contextlib.contextmanager
    def _count_live(self) -> Iterator[None]:
        """Count a transfer as live."""
        self._live += 1
        self._metrics.live_transfers.set(self._live)
        try:
            yield
        finally:
            self._live -= 1
            self._metrics.live_transfers.set(self._live)

    def _local(self, reason: str, clock: FirstTokenClock) -> PrefillSource:
        self._metrics.prompts.count(LOCAL, reason)
        return PrefillSource(reason=reason, clock=clock)

    # ---- the choice ------------------------------------------------------------------------

    def _choose(
        self, sequence: Sequence, candidates: list[pb.PrefillCandidate], deadline: float
    ) -> tuple[list[pb.PrefillCandidate], str]:
        """The prefill nodes worth trying, in the router's order, or why there are none."""
        if not candidates:
            return [], LocalReason.NO_NODE
        if sequence.wants_prompt_logprobs:
            return [], LocalReason.PROMPT_LOGPROBS  # they need the logits of every position
        if sequence.wants_every_position:
            return [], LocalReason.POOLING
        allowed = [node for node in candidates if not self._peers.refuses(node)]
        if not allowed:
            return [], LocalReason.REFUSED
        seconds = deadline - time.monotonic()
        reasons = [self._why_local(sequence, node, seconds) for node in allowed]
        worth = [node for node, reason in zip(allowed, reasons, strict=True) if not reason]
        return worth, "" if worth else reasons[0]

    def _why_local(self, sequence: Sequence, node: pb.PrefillCandidate, seconds: float) -> str:
        core, peer = self._engine.core, self._peers.at(node)
        if peer is not None and self._end(sequence, peer) <= sequence.computed:
            return LocalReason.NOTHING_MISSING if sequence.computed else LocalReason.SHORT
        link = peer.link if peer is not None else MeasuredLink()
        load = core.load()
        here = LocalEstimate(
            tokens_per_second=core.prefill_tokens_per_second,
            min_tokens_per_second=core.min_prefill_tokens_per_second,
            # A sequence in mid-stream goes ahead of the queue.
            queued_tokens=0 if sequence.mid_stream else load.queued_prefill_tokens,
            running=load.running,
        )
        there = RemoteEstimate(
            tokens_per_second=node.prefill_tokens_per_second,
            queued_tokens=node.queued_prefill_tokens,
            round_trip=link.round_trip,
            link_tokens_per_second=link.tokens_per_second,
        )
        end = len(sequence.prompt) - 1
        return why_local(
            here,
            there,
            prompt=end,
            missing=end - sequence.computed,
            threshold=self._config.prefill_threshold,
            seconds=seconds,
        )

    def _end(self, sequence: Sequence, peer: Peer) -> int:
        """The prompt token up to which a peer's KV is used: the last one, or the end of the last
        whole block if the peer rounds differently than this node.

        Only whole blocks are cached. If such a peer's KV were used beyond them, a repeated prompt,
        whose last tokens may be computed here, could get a different output.
        """
        last, size = len(sequence.prompt) - 1, self._engine.resolved.block_size
        same = (peer.weight_format, peer.kv_dtype) == (
            self._engine.weight_format,
            self._engine.kv_dtype,
        )
        return last if same else last // size * size

    # ---- one attempt -----------------------------------------------------------------------

    async def _try(
        self, prompt: _Prompt, number: int, candidate: pb.PrefillCandidate
    ) -> TransferResult | None:
        """Try one node; ``None`` if the attempt failed. Raises ``GivenUpError``."""
        with log_context(transfer_id=str(prompt.transfer_id), attempt=str(number + 1)):
            try:
                return await self._attempt(prompt, number, candidate)
            except TransferError as error:
                prompt.clock.failed()
                prompt.failure = failed(error.cause)
                level = logging.WARNING if self._is_news(candidate, error) else logging.DEBUG
                message = "attempt %d at transfer %d failed: %s"
                log.log(level, message, number + 1, prompt.transfer_id, error)
                if await self._has_died(candidate, error):
                    prompt.deaths.add(candidate.node_id)
                return None

    def _is_news(self, candidate: pb.PrefillCandidate, error: TransferError) -> bool:
        """False if the failure is logged already: the node is backed off from, or no transfer from
        it has succeeded since it failed for the same cause.

        Until routers notice that a node has died, every request fails there in the same way."""
        if isinstance(error, BackedOffError):
            return False
        if error.computing:
            return True
        failure = (candidate.epoch, error.cause)
        if self._failing.get(candidate.address) == failure:
            return False
        if len(self._failing) >= MAX_PEERS:
            self._failing.clear()
        self._failing[candidate.address] = failure
        return True

    async def _attempt(
        self, prompt: _Prompt, number: int, candidate: pb.PrefillCandidate
    ) -> TransferResult:
        """On return every block is filled and checked; after an exception no rank writes to them
        any longer. Raises ``TransferError``."""
        sequence = prompt.reception.sequence
        tokens = len(sequence.prompt) - 1 - sequence.computed
        with (
            step(
                "transfer",
                transfer_id=str(prompt.transfer_id),
                attempt=number + 1,
                node=candidate.node_id,
                tokens=tokens,
            ) as span,
            self._metrics.transfers.attempt(number) as record,
            self._backing_off(candidate),
        ):
            peer = await self._peers.meet(candidate)
            span.event("greeted")
            prompt.clock.greeted()
            end = self._end(sequence, peer)
            if end <= sequence.computed:
                record.succeeded("committed", 0, None)
                return TransferResult(0, None, sequence.computed)
            try:
                result = await self._node.receive(
                    prompt.reception,
                    peer,
                    prompt.transfer_id,
                    number,
                    end,
                    prompt.remaining_seconds,
                )
            except PeerLostError:
                await self._peers.forget(peer)
                raise
            finally:
                record.carrier = self._node.inbox.connections.carrier(peer.node_id, peer.epoch)
            exposed = result.done.exposed_seconds if result.done is not None else None
            record.succeeded("committed", result.bytes, exposed)
            prompt.clock.received(result.done)
            self._failing.pop(candidate.address, None)
            return result

    @contextlib.contextmanager
    def _backing_off(self, candidate: pb.PrefillCandidate) -> Iterator[None]:
        """Back off from a node whose silence delayed the request by seconds, or that has no place
        for this node: each greeting is work for it."""
        start = time.monotonic()
        try:
            yield
        except BackedOffError:
            raise
        except TransferError as error:
            if error.cause is Cause.NO_PLACE:
                self._peers.prefill_backoff.add(
                    candidate.address, candidate.epoch, str(error), error.cause
                )
            elif error.cause in SILENCE and time.monotonic() - start > SLOW_SECONDS:
                self._peers.prefill_backoff.add(candidate.address, candidate.epoch, str(error))
            raise
        self._peers.prefill_backoff.end(candidate.address)

    async def _has_died(self, candidate: pb.PrefillCandidate, error: TransferError) -> bool:
        """True if the node's process ended while it computed. The connection alone may break, or
        the process fall silent, for reasons unrelated to the prompt."""
        if error.cause is Cause.DIED:
            return True
        broken = error.computing and error.cause is Cause.PEER_LOST
        return broken and await self._peers.has_ended(candidate)


def _cached(done: pb.OpenDone | None, sequence: Sequence) -> int:
    """The number of received tokens that the prefill node had in its prefix index.

    The node counts from the start of the prompt, and its count is not trusted."""
    if done is None:
        return 0
    first = sequence.computed - sequence.received
    return min(max(0, done.cached_tokens - first), sequence.received)
