"""The KV of a prompt: reserve blocks, try the prefill nodes in turn, else prefill here.

Each attempt is ``receiving.py``'s; this module owns the reservation and the result. No token
reaches the client before the commit, so clients see none of this.
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

# An attempt that fails sooner costs a request too little to back off from the node.
SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PrefillSource:
    """The node that computed a prompt's KV. ``node`` is empty for local prefill; ``reason`` is one
    of ``shared/telemetry/prefill_origin.py`` then. ``cached`` tokens of those that it sent were in
    its prefix index."""

    node: str = ""
    reason: str = ""
    cached: int = 0
    clock: FirstTokenClock = field(default_factory=FirstTokenClock, compare=False)


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """A prompt on its way into this node's cache."""

    reception: Reception
    deadline: float  # by the monotonic clock
    deaths: PromptDeaths
    transfer_id: int
    clock: FirstTokenClock
    failure: str = ""  # of the last attempt

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


class Transfers:
    """Opens transfers for sequences, and ends the reception of each."""

    def __init__(self, node: ReceivingNode, peers: Peers, metrics: NodeMetrics) -> None:
        self._node = node
        self._engine = node.engine
        self._config = node.config
        self._peers = peers
        self._metrics = metrics
        self._live = 0
        # By address, the failure that was logged last, until a transfer succeeds.
        self._failing: dict[str, tuple[int, Cause]] = {}

    async def prefill_remotely(
        self,
        sequence: Sequence,
        candidates: list[pb.PrefillCandidate],
        deadline: float,
        deaths: PromptDeaths,
    ) -> PrefillSource:
        """Fill a new sequence's prompt from a prefill node, or queue it for local prefill.

        ``deadline`` is when the request ends, by the monotonic clock. Either way the sequence is
        scheduled on return. When cancelled, the sequence is finished and its blocks are free; also
        when it raises ``GivenUpError``, because too many processes died with this prompt.
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
        # The choice may have changed meanwhile.
        usable, reason = self._choose(sequence, candidates, deadline)
        prompt = _Prompt(
            reception=reception,
            deadline=deadline,
            deaths=deaths,
            transfer_id=secrets.randbits(63),
            clock=clock,
        )
        try:
            with self._counted():
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
    def _counted(self) -> Iterator[None]:
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
        """The prefill nodes that are worth trying, in the router's order, or why there is none."""
        if not candidates:
            return [], LocalReason.NO_NODE
        if sequence.wants_prompt_logprobs:
            return [], LocalReason.PROMPT_LOGPROBS  # they need every position's logits here
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
        core, peer = self._engine.core, self._peers.known(node)
        if peer is not None and self._end(sequence, peer) <= sequence.computed:
            return LocalReason.NOTHING_MISSING if sequence.computed else LocalReason.SHORT
        link = peer.link if peer is not None else MeasuredLink()
        load = core.load()
        here = LocalEstimate(
            tokens_per_second=core.prefill_tokens_per_second,
            at_least=core.min_prefill_tokens_per_second,
            # One in mid-stream goes first; there it would wait for a step in flight, which is long.
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
        """The prompt token up to which a peer's KV is used.

        It is the last one, unless the peer rounds otherwise than this node. Of such a peer only
        whole blocks are taken, since no others are cached: if the prompt is repeated, the tokens
        after them may be computed here, and the answer would differ.
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
                told = "attempt %d at transfer %d failed: %s"
                log.log(level, told, number + 1, prompt.transfer_id, error)
                if await self._has_died(candidate, error):
                    prompt.deaths.add(candidate.node_id)
                return None

    def _is_news(self, candidate: pb.PrefillCandidate, error: TransferError) -> bool:
        """False if the failure has been logged: during a pause, or of a node that has not taken a
        prompt since it failed for the same cause. Until routers miss a node that has died, each
        request finds out about it."""
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
        """On return every block is filled and checked; on any exception no rank writes them any
        longer. Raises ``TransferError``."""
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
                    prompt.reception, peer, prompt.transfer_id, number, end, prompt.seconds_left
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
        """Back off from a node whose silence cost the request seconds, or that has no place for
        this one: each greeting is work for it."""
        begun = time.monotonic()
        try:
            yield
        except BackedOffError:
            raise
        except TransferError as error:
            if error.cause is Cause.NO_PLACE:
                self._peers.prefill_backoff.add(
                    candidate.address, candidate.epoch, str(error), error.cause
                )
            elif error.cause in SILENCE and time.monotonic() - begun > SLOW_SECONDS:
                self._peers.prefill_backoff.add(candidate.address, candidate.epoch, str(error))
            raise
        self._peers.prefill_backoff.end(candidate.address)

    async def _has_died(self, candidate: pb.PrefillCandidate, error: TransferError) -> bool:
        """True if the node's process ended while it computed. A broken connection or a silent
        process may have reasons that have nothing to do with the prompt."""
        if error.cause is Cause.DIED:
            return True
        broken = error.computing and error.cause is Cause.PEER_LOST
        return broken and await self._peers.has_ended(candidate)


def _cached(done: pb.OpenDone | None, sequence: Sequence) -> int:
    """The received tokens that the prefill node had in its prefix index. It counts from the start
    of the prompt, and is not trusted."""
    if done is None:
        return 0
    first = sequence.computed - sequence.received
    return min(max(0, done.cached_tokens - first), sequence.received)
