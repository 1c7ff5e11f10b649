"""The canary on a decode node: comparison, result and cleanup."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tandem.decode_node.canary import Canary
from tandem.decode_node.receiving import TransferResult
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Generate
from tandem.shared.errors import PeerRefusedError, TransferError
from tandem.shared.handoff.plane.messages import Compare
from tandem.tests.support.fake_node import FakeNode
from tandem.tests.support.waiting import until


class DecidedTransfer:
    """Stands in for ``ReceivingNode``: a transfer that succeeds or fails at once."""

    def __init__(self, node: FakeNode) -> None:
        self.engine, self.inbox = node.engine, node.ranks.inbox
        self.error: TransferError | None = None
        self.sequences: list[Sequence] = []

    async def receive(self, reception: Reception, *_: Any) -> TransferResult:
        self.sequences.append(reception.sequence)
        if self.error is not None:
            raise self.error
        return TransferResult(0, None, 0)


class Somewhere:
    address = "10.0.0.1:5"
    kv_dtype = weight_format = "float32"


async def check(node: FakeNode, receiving: DecidedTransfer) -> None:
    async with node.running():
        await Canary(receiving).check(Somewhere())  # type: ignore[arg-type]


async def test_equal_kv_passes_and_both_sides_computed_it_themselves() -> None:
    node = FakeNode("d", 7)
    receiving = DecidedTransfer(node)
    node.ranks.excess = 0.9
    await check(node, receiving)
    [theirs] = receiving.sequences
    assert theirs.work.private and len(theirs.prompt) == 31
    [first, second] = node.ranks.of(Compare)
    assert first == second and (first.first_token, first.end_token) == (0, 30)
    assert not set(first.ours) & set(first.theirs) and len(first.ours) == len(first.theirs) == 2
    assert node.scheduler.pool.counts().cached == 0


async def test_a_mismatch_on_any_rank_names_where_and_how_much() -> None:
    node = FakeNode("d", 7)
    node.ranks.excess = 1.5
    with pytest.raises(PeerRefusedError) as caught:
        await check(node, DecidedTransfer(node))
    for part in ("10.0.0.1:5", "V of layer 2 differs by 1.5", "float32 allows 1"):
        assert part in str(caught.value)


async def test_a_failed_transfer_or_computation_is_no_mismatch() -> None:
    node = FakeNode("d", 7)
    receiving = DecidedTransfer(node)
    receiving.error = TransferError("connection lost")
    with pytest.raises(TransferError, match="connection lost") as caught:
        await check(node, receiving)
    assert not isinstance(caught.value, PeerRefusedError)

    node = FakeNode("d", 7)
    node.ranks.fails = "not finite"
    with pytest.raises(TransferError, match="could not compute the canary: not finite"):
        await check(node, DecidedTransfer(node))


async def test_a_canary_waits_for_blocks_in_a_full_pool() -> None:
    node = FakeNode("d", 7, blocks=8)
    reserved = node.scheduler.pool.reserve(7)
    async with node.running():
        canary = asyncio.create_task(Canary(DecidedTransfer(node)).check(Somewhere()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        # It does not hold one of the two that it needs.
        assert not node.scheduler.reservations.sequences()
        node.scheduler.pool.cancel_reservation(reserved)
        await asyncio.wait_for(canary, 10)


async def test_a_canary_goes_ahead_of_three_hundred_waiting_prompts() -> None:
    """The waiting prompts would take thousands of steps."""
    node = FakeNode("d", 7, blocks=512)
    node.ranks.says = 5
    waiting = [
        Sequence(node.core.new_id(), [number % 256] * 500, Generate(SamplingParams(max_tokens=8)))
        for number in range(300)
    ]
    for sequence in waiting:
        node.scheduler.enqueue(sequence)
    async with node.running():
        await until(lambda: node.core.counters.steps > 10)
        before = node.core.counters.steps
        await Canary(DecidedTransfer(node)).check(Somewhere())  # type: ignore[arg-type]
        assert node.core.counters.steps - before < 10
        for sequence in waiting:
            node.core.cancel(sequence)


async def test_a_canary_waits_for_a_long_step_of_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An overloaded node needs the peer most."""
    monkeypatch.setattr("tandem.decode_node.canary.CANARY_SECONDS", 0.01)
    waits, wait = Counter[int](), asyncio.wait

    async def counting_wait(*arguments: Any, **options: Any) -> Any:
        waits[0] += 1
        return await wait(*arguments, **options)

    node = FakeNode("d", 7)
    node.ranks.computes.clear()
    async with node.running():
        canary = asyncio.create_task(Canary(DecidedTransfer(node)).check(Somewhere()))  # type: ignore[arg-type]
        monkeypatch.setattr(asyncio, "wait", counting_wait)
        await until(lambda: waits[0] > 3 or canary.done())
        monkeypatch.setattr("tandem.decode_node.canary.CANARY_SECONDS", 10.0)
        node.ranks.computes.set()
        await canary


async def test_a_canary_has_a_deadline_if_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.decode_node.canary.CANARY_SECONDS", 0.05)
    node = FakeNode("d", 7)  # its engine does not run
    with pytest.raises(TransferError, match="the canary took longer than"):
        await Canary(DecidedTransfer(node)).check(Somewhere())  # type: ignore[arg-type]
    assert node.scheduler.idle


async def test_a_canary_has_a_deadline_if_no_block_becomes_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.decode_node.canary.CANARY_SECONDS", 0.05)
    node = FakeNode("d", 7, blocks=8)
    reserved = node.scheduler.pool.reserve(8)
    async with node.running():
        with pytest.raises(TransferError, match="or has no free blocks"):
            await Canary(DecidedTransfer(node)).check(Somewhere())  # type: ignore[arg-type]
        node.scheduler.pool.cancel_reservation(reserved)
