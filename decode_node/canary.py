"""The canary: a short prompt, prefilled here and on a peer before clients' KV is transferred."""

from __future__ import annotations

import asyncio
import secrets

from ..shared.causes import Cause
from ..shared.engine.reception import Reception
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.engine.work import Compute
from ..shared.errors import PeerRefusedError, TransferError
from ..shared.handoff.plane.canary import Difference, canary_prompt, coarsest
from ..shared.handoff.plane.messages import Compare, Compared, ReceiveFailed
from ..shared.models.spec import layers_before_routing
from ..shared.process.tasks import uninterrupted
from ..shared.telemetry.tracing import step
from .peering.peer import Peer
from .receiving import ReceivingNode

# Time limit of each part of a canary on this node. It does not apply during a step: one may take
# minutes on a CPU, and the watchdog ends one that hangs.
CANARY_SECONDS = 30.0
# Time limit of the transfer; its two ends watch its progress.
TRANSFER_SECONDS = 3600.0
# Interval of attempts to reserve blocks; every sequence that ends frees some.
RETRY_SECONDS = 0.05


class Canary:
    """Compares a peer's KV with this node's."""

    def __init__(self, node: ReceivingNode) -> None:
        self._node = node
        self._core = node.engine.core
        self._prompt = canary_prompt(
            node.engine.spec.vocab_size, node.engine.resolved.max_model_len
        )

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV a canary transfers."""
        return len(self._prompt) - 1

    async def check(self, peer: Peer) -> int:
        """Run a canary; returns the bytes transferred.

        Raises ``PeerRefusedError`` if the KV differs, ``TransferError`` if it cannot be compared.
        """
        try:
            with step("canary", address=peer.address):
                return await self._check(peer)
        except TimeoutError:
            raise TransferError(
                f"{peer.address}: the canary took longer than {CANARY_SECONDS:g} s; this node or "
                f"that one is stuck, or has no free blocks",
                cause=Cause.CANARY,
            ) from None

    async def _check(self, peer: Peer) -> int:
        end = self.tokens
        ours, theirs = self._sequence(), self._sequence()
        async with asyncio.timeout(CANARY_SECONDS):
            reception = await self._reserve(theirs, end)
        try:
            computed = self._compute(ours)
            transfer_id = secrets.randbits(63)
            result = await self._node.receive(
                reception, peer, transfer_id, 0, end, TRANSFER_SECONDS
            )
            await self._wait_computed(computed)
            async with asyncio.timeout(CANARY_SECONDS):
                worst = await self._compare(ours, theirs, end, coarsest(self._formats(peer)))
        finally:
            reception.cancel()
            self._core.cancel(ours)
            self._core.release_blocks(ours)
        if worst.ratio > 1:
            raise PeerRefusedError(
                f"{peer.address} computes different KV than this node for the same prompt: "
                f"{worst.component} of layer {worst.layer} differs by {worst.largest:.3g}, and "
                f"{' and '.join(self._formats(peer))} allows {worst.limit:.3g}; start both "
                f"nodes with the same weights and version of Tandem",
                cause=Cause.CANARY,
            )
        return result.bytes

    async def _reserve(self, theirs: Sequence, end: int) -> Reception:
        """Reserve blocks, waiting until there are any: a full node needs its peers most.

        The caller's deadline ends the wait."""
        while (reception := self._core.reserve(theirs, end)) is None:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_SECONDS)
        return reception

    def _formats(self, peer: Peer) -> list[str]:
        """The distinct dtypes that round the KV of a prompt, on either node."""
        engine = self._node.engine
        here, there = (engine.weight_format, engine.kv_dtype), (peer.weight_format, peer.kv_dtype)
        return list(dict.fromkeys((*here, *there)))

    def _sequence(self) -> Sequence:
        # Private: neither node may use a cached block instead of computing it.
        return Sequence(self._core.new_id(), self._prompt, Compute(self.tokens, private=True))

    def _compute(self, sequence: Sequence) -> asyncio.Future[None]:
        """Prefill here while the peer does; the queue's limit applies to clients only."""
        done = asyncio.get_running_loop().create_future()

        def on_step(output: StepOutput) -> None:
            if output.finish_reason is not None and not done.done():
                done.set_result(None)

        self._core.listen(sequence, on_step)
        self._core.enqueue(sequence)
        return done

    async def _wait_computed(self, done: asyncio.Future[None]) -> None:
        """Wait for the prefill here. Raises ``TimeoutError`` if the engine makes no steps."""
        while not done.done():
            await asyncio.wait([done], timeout=CANARY_SECONDS)
            if not done.done() and not self._core.stepping:
                raise TimeoutError

    async def _compare(
        self, ours: Sequence, theirs: Sequence, end: int, rounding: str
    ) -> Difference:
        """The largest difference over all ranks; each rank compares its own heads."""
        if ours.finish_reason is not FinishReason.COMPUTED:
            reason = f"this node could not compute the canary: {ours.error}"
            raise TransferError(reason, cause=Cause.CANARY)
        inbox, ranks = self._node.inbox, self._node.engine.world_size
        attempt = inbox.open(secrets.randbits(63), 0)
        try:
            for rank in range(ranks):
                compare = Compare(
                    transfer_id=attempt.transfer_id,
                    attempt=attempt.attempt,
                    ours=tuple(ours.block_table),
                    theirs=tuple(theirs.block_table),
                    first_token=0,
                    end_token=end,
                    rounding=rounding,
                    exact_layers=layers_before_routing(self._node.engine.spec),
                )
                inbox.command(attempt, rank, compare)
            differences = [_difference(await attempt.events.get()) for _ in range(ranks)]
        finally:
            await uninterrupted(inbox.close(attempt, sending=False))
        return max(differences, key=lambda difference: difference.ratio)


def _difference(event: object) -> Difference:
    if isinstance(event, ReceiveFailed):
        raise TransferError(event.reason, cause=Cause(event.cause))
    assert isinstance(event, Compared)
    return Difference(event.layer, event.component, event.largest, event.limit)
