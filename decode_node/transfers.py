"""Where a prompt's KV comes from: reserve, try the prefill nodes in turn, else prefill here.

Each attempt is ``receiving.py``'s; this owns the reservation and the outcome. No token reaches the
client before the commit, so none of this can be seen.
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
from ..shared.engine.sequence import Sequence
from ..shared.errors import TransferError
from ..shared.node.metrics import NodeMetrics
from ..shared.telemetry.logs import log_context
from ..shared.telemetry.prefill_origin import LOCAL, REMOTE, LocalReason, failed
from ..shared.telemetry.tracing import step
from .deaths import PromptDeaths
from .estimate import LocalEstimate, RemoteEstimate, why_local
from .first_token import FirstTokenClock
from .peer import PeerLostError
from .peers import Peers
from .prefill_backoff import SILENCE, BackedOffError
from .receiving import Receipt, ReceivingNode

log = logging.getLogger("tandem.decode")

# An attempt that fails sooner costs a request nothing that is worth avoiding.
SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a prompt's KV came from. ``node`` is empty for local prefill, with the reason why: one
    of ``shared/telemetry/prefill_origin.py``."""

    node: str = ""
    reason: str = ""
    clock: FirstTokenClock = field(default_factory=FirstTokenClock, compare=False)


class Transfers:
    """Opens transfers for sequences and settles each one exactly once."""

    def __init__(self, node: ReceivingNode, peers: Peers, metrics: NodeMetrics) -> None:
        self._node = node
        self._engine = node.engine
        self._config = node.config
        self._peers = peers
        self._metrics = metrics
        self._live = 0

    async def prefill_remotely(
        self,
        sequence: Sequence,
        candidates: list[pb.PrefillCandidate],
        deadline: float,
        deaths: PromptDeaths,
    ) -> Outcome:
        """Fill a new sequence's prompt from a prefill node, or queue it for local prefill.

        ``deadline`` is when the request ends, by the monotonic clock. Either way the sequence is
        scheduled on return. When cancelled, the sequence is finished and its blocks are free, and
        also when it raises ``GivenUpError``: too many processes have ended with this prompt.
        """
        core, clock = self._engine.core, FirstTokenClock()
        end = len(sequence.prompt) - 1
        core.match_prefix(sequence)
        _, reason = self._choose(sequence, candidates, deadline)
        if reason:
            return self._locally(sequence, reason, clock)
        reserved = await core.reserve_in_turn(sequence, end)
        # What was true may not be any more, if it took long.
        usable, reason = self._choose(sequence, candidates, deadline)
        transfer_id = secrets.randbits(63)
        self._live += 1
        self._metrics.live_transfers.set(self._live)
        try:
            for number, candidate in enumerate(usable):
                with log_context(transfer_id=str(transfer_id), attempt=str(number + 1)):
                    try:
                        receipt = await self._attempt(
                            sequence, transfer_id, number, candidate, deadline, clock
                        )
                    except TransferError as error:
                        clock.failed()
                        reason = failed(error.cause)
                        log.warning(
                            "attempt %d at transfer %d failed: %s", number + 1, transfer_id, error
                        )
                        if await self._has_died(candidate, error):
                            deaths.add(candidate.node_id)
                        continue
                core.commit_received(sequence, reserved, end, receipt.whole_from)
                self._metrics.prompts.count(REMOTE)
                return Outcome(candidate.node_id, clock=clock)
        except BaseException:
            core.cancel_received(sequence, reserved)
            raise
        finally:
            self._live -= 1
            self._metrics.live_transfers.set(self._live)
        core.abandon_received(sequence, reserved)
        self._metrics.prompts.count(LOCAL, reason)
        return Outcome(reason=reason, clock=clock)

    async def _has_died(self, candidate: pb.PrefillCandidate, error: TransferError) -> bool:
        """Whether the node's process ended while it computed. A connection may also break, and a
        process fall silent, for reasons that have nothing to do with the prompt."""
        if error.cause is Cause.DIED:
            return True
        broken = error.computing and error.cause is Cause.PEER_LOST
        return broken and await self._peers.has_ended(candidate)

    def _choose(
        self, sequence: Sequence, candidates: list[pb.PrefillCandidate], deadline: float
    ) -> tuple[list[pb.PrefillCandidate], str]:
        """The prefill nodes that are worth trying, in the router's order, or why there is none."""
        if not candidates:
            return [], LocalReason.NO_NODE
        if sequence.params.prompt_logprobs is not None:
            return [], LocalReason.PROMPT_LOGPROBS  # they need every position's logits here
        allowed = [node for node in candidates if not self._peers.refuses(node)]
        if not allowed:
            return [], LocalReason.REFUSED
        seconds = deadline - time.monotonic()
        reasons = [self._why_local(sequence, node, seconds) for node in allowed]
        worth = [node for node, reason in zip(allowed, reasons, strict=True) if not reason]
        return worth, "" if worth else reasons[0]

    def _why_local(self, sequence: Sequence, node: pb.PrefillCandidate, seconds: float) -> str:
        core, link = self._engine.core, self._peers.link(node)
        load = core.load()
        here = LocalEstimate(
            tokens_per_second=core.prefill_tokens_per_second,
            queued_tokens=load.queued_prefill_tokens,
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

    def _locally(self, sequence: Sequence, reason: str, clock: FirstTokenClock) -> Outcome:
        self._metrics.prompts.count(LOCAL, reason)
        self._engine.core.enqueue(sequence)
        return Outcome(reason=reason, clock=clock)

    @contextlib.contextmanager
    def _noticing_absence(self, candidate: pb.PrefillCandidate) -> Iterator[None]:
        """Leave a node alone for a while when its silence costs a request seconds, or when it has
        no place: each greeting is work for it."""
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

    async def _attempt(
        self,
        sequence: Sequence,
        transfer_id: int,
        number: int,
        candidate: pb.PrefillCandidate,
        deadline: float,
        clock: FirstTokenClock,
    ) -> Receipt:
        """One try with one node. On return every block is filled and checked; on any exception no
        rank writes them any more."""
        tokens = len(sequence.prompt) - 1 - sequence.computed
        with (
            step(
                "transfer",
                transfer_id=str(transfer_id),
                attempt=number + 1,
                node=candidate.node_id,
                tokens=tokens,
            ) as span,
            self._metrics.transfers.attempt(number) as record,
            self._noticing_absence(candidate),
        ):
            peer = await self._peers.meet(candidate)
            span.event("greeted")
            clock.greeted()
            try:
                seconds = deadline - time.monotonic()
                receipt = await self._node.receive(sequence, peer, transfer_id, number, seconds)
            except PeerLostError:
                await self._peers.forget(peer)
                raise
            finally:
                record.carrier = self._node.inbox.connections.carrier(peer.node_id, peer.epoch)
            exposed = receipt.account.exposed_seconds if receipt.account is not None else None
            record.succeeded("committed", receipt.bytes, exposed)
            clock.received(receipt.account)
            return receipt
