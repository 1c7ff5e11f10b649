"""Layers that are announced before a GPU has computed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.shared.engine.messages import ExecuteStep, KVStream
from tandem.shared.engine.plan import SequenceStep, StepPlan
from tandem.shared.engine.rank.process import RankProcess
from tandem.shared.handoff.plane.messages import CancelSend, Expecting, LayerReady, SendFinished
from tandem.shared.handoff.plane.pending_layers import PendingLayer
from tandem.tests.shared.handoff.support.by_hand import HandRank, World
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    LAYERS,
    PlaneRank,
    expect,
    rows,
    until,
)

END = 2 * BLOCK
BLOCKS = (4, 2)


class FakeEvent:
    """A CUDA event that the test completes."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self) -> bool:
        return self.passed


def announce(rank: PlaneRank, number: int, layer: int, computed: Callable[[], bool]) -> None:
    ready = LayerReady(
        transfer_id=number,
        attempt=1,
        first_layer=layer,
        end_layer=layer + 1,
        first_token=0,
        end_token=END,
    )
    rank.plane.submit(PendingLayer(ready, computed))


def _opened(world: World) -> tuple[HandRank, HandRank, list[int]]:
    """A transfer of which nothing is computed, and the layers that have been packed."""
    prefill, decode = world.rank("p", seed=1), world.rank("d", listen_host=None)
    packed: list[int] = []
    pack = prefill.cache.pack

    def noted(layer: int, *of: Any) -> None:
        packed.append(layer)
        pack(layer, *of)

    prefill.cache.pack = noted  # type: ignore[method-assign, assignment]
    decode.plane.submit(expect(prefill, 1, BLOCKS, first_token=0, end_token=END))
    world.until(lambda: bool(decode.log.of(Expecting)))
    prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
    return prefill, decode, packed


def test_a_layer_leaves_when_it_is_computed_and_no_later_one_with_it() -> None:
    with World("cuda_ipc") as world:
        prefill, decode, packed = _opened(world)
        marks = [FakeEvent() for _ in range(LAYERS)]
        for layer, mark in enumerate(marks):
            announce(prefill, 1, layer, mark)
        world.turn(5)
        assert not packed and prefill.loop._pending_layers.any
        for layer, mark in enumerate(marks):
            mark.passed = True
            world.until(lambda layer=layer: layer in packed)  # type: ignore[misc]
            world.turn(3)
            assert set(packed) == set(range(layer + 1))
        world.until(lambda: bool(prefill.log.of(SendFinished)))
        assert not prefill.loop._pending_layers.any
        assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def test_layers_leave_in_the_order_of_the_stream() -> None:
    with World("tcp") as world:
        prefill, _, packed = _opened(world)
        first, second = FakeEvent(), FakeEvent()
        announce(prefill, 1, 0, first)
        announce(prefill, 1, 1, second)
        second.passed = True  # before its stream gets there, and not polled
        world.turn(5)
        assert not packed
        first.passed = True
        world.until(lambda: packed == [0, 1])
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))


def test_announcements_for_a_cancelled_transfer_are_ignored() -> None:
    with World("cuda_ipc") as world:
        prefill, _, packed = _opened(world)
        mark = FakeEvent()
        announce(prefill, 1, 0, mark)
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
        world.turn(3)
        mark.passed = True
        world.until(lambda: not prefill.loop._pending_layers.any)
        assert not packed and prefill.plane.stats().active_sends == 0


def test_the_plane_looks_again_by_itself() -> None:
    """No event wakes it when a GPU has finished a layer."""
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        asked = [0]

        def computed() -> bool:
            asked[0] += 1
            return asked[0] > 20

        for layer in range(LAYERS):
            announce(prefill, 1, layer, computed)
        until(lambda: bool(prefill.log.of(SendFinished)))


class Announcements:
    """A data plane that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def submit(self, command: Any) -> None:
        self.told.append(command)


def test_an_engine_marks_each_layer_once_for_all_its_sequences() -> None:
    rank = RankProcess(channel=None)  # type: ignore[arg-type]
    rank._plane = plane = Announcements()  # type: ignore[assignment]
    steps = [SequenceStep(number, [5, 6], 10 * number, [1], False) for number in (1, 2, 3)]
    streams = [KVStream(1, 7, 1), KVStream(3, 8, 2)]
    hook = rank._layer_hook(ExecuteStep(StepPlan(1, steps), streams))
    assert hook is not None
    hook(0)
    assert [type(each) for each in plane.told] == [LayerReady, LayerReady]
    marks: list[FakeEvent] = []
    rank._layer_marker = lambda: marks.append(FakeEvent()) or marks[-1]  # type: ignore[func-returns-value]
    hook = rank._layer_hook(ExecuteStep(StepPlan(2, steps), streams))
    assert hook is not None
    plane.told.clear()
    for layer in (0, 1):
        hook(layer)
    assert len(marks) == 2
    first, second, third, _ = plane.told
    assert first.is_computed is second.is_computed is marks[0] and third.is_computed is marks[1]
    assert (first.ready.transfer_id, first.ready.first_token, first.ready.end_token) == (7, 10, 12)
    assert (second.ready.transfer_id, second.ready.attempt) == (8, 2)
