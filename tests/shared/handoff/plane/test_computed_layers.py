"""Layers that are announced before a GPU has computed them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tandem.shared.engine.messages import ExecuteStep, KVSending
from tandem.shared.engine.plan import SequenceStep, StepPlan
from tandem.shared.engine.rank.process import RankProcess
from tandem.shared.handoff.plane.computed_layers import ComputedLayers
from tandem.shared.handoff.plane.messages import CancelSend, LayerReady, SendFinished
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCK,
    LAYERS,
    PlaneRank,
    rows,
    until,
)

END = 2 * BLOCK
BLOCKS = (4, 2)


class FakeStream:
    """A GPU's stream, whose events the test completes in their order."""

    def __init__(self) -> None:
        self.events: list[threading.Event] = []

    def mark(self) -> Callable[[], Any]:
        self.events.append(threading.Event())
        return self.events[-1].wait

    def compute(self, layer: int) -> None:
        self.events[layer].set()


def ready(number: int, layer: int) -> LayerReady:
    return LayerReady(
        transfer_id=number,
        attempt=1,
        first_layer=layer,
        end_layer=layer + 1,
        first_token=0,
        end_token=END,
    )


def test_layers_leave_when_they_are_computed_and_no_later_one_with_them() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        stream, submitted = FakeStream(), list[int]()

        def submit(layer: LayerReady) -> None:
            submitted.append(layer.first_layer)
            prefill.plane.submit(layer)

        computed = ComputedLayers(stream.mark, submit, LAYERS)
        for layer in range(LAYERS):
            computed.announce([ready(1, layer)])
        assert LAYERS == 3 and len(stream.events) == 2 and not submitted
        for mark, count in enumerate((2, 3)):
            stream.compute(mark)
            until(lambda count=count: len(submitted) >= count)  # type: ignore[misc]
            assert submitted == list(range(count))
        until(lambda: bool(prefill.log.of(SendFinished)))
        assert rows(decode.cache, BLOCKS, 0, END) == rows(prefill.cache, BLOCKS, 0, END)


def test_the_last_layer_leaves_alone() -> None:
    for num_layers, marks in ((1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)):
        stream = FakeStream()
        computed = ComputedLayers(stream.mark, lambda _: None, num_layers)
        for layer in range(num_layers):
            computed.announce([ready(1, layer)])
        assert len(stream.events) == marks


def test_a_layer_of_a_step_that_failed_does_not_leave_with_the_next_step() -> None:
    stream, submitted = FakeStream(), list[LayerReady]()
    computed = ComputedLayers(stream.mark, submitted.append, 8)
    computed.announce([ready(1, 0)])
    for layer in range(2):
        computed.announce([ready(2, layer)])
    stream.compute(0)
    until(lambda: len(submitted) >= 2)
    assert submitted == [ready(2, 0), ready(2, 1)]


def test_layers_leave_in_the_order_of_the_stream() -> None:
    stream, submitted = FakeStream(), list[LayerReady]()
    computed = ComputedLayers(stream.mark, submitted.append, 2)
    for layer in range(2):
        computed.announce([ready(1, layer), ready(2, layer)])
    stream.compute(1)  # before its stream gets there
    assert not submitted
    stream.compute(0)
    until(lambda: len(submitted) == 4)
    assert [(each.first_layer, each.transfer_id) for each in submitted] == [
        *((0, 1), (0, 2), (1, 1), (1, 2))
    ]


def test_announcements_for_a_cancelled_transfer_are_ignored() -> None:
    with PlaneRank("p", seed=1) as prefill, PlaneRank("d", listen_host=None) as decode:
        decode.expect(prefill, 1, BLOCKS, first_token=0, end_token=END)
        prefill.open(decode, 1, BLOCKS, first_token=0, end_token=END)
        stream = FakeStream()
        computed = ComputedLayers(stream.mark, prefill.plane.submit, 1)
        computed.announce([ready(1, 0)])
        prefill.plane.submit(CancelSend(transfer_id=1, attempt=1))
        stream.compute(0)
        until(lambda: prefill.plane.stats().cancelled == 1)
        until(lambda: prefill.plane.stats().active_sends == 0)  # filled in once a round


def test_the_layers_after_one_that_failed_are_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step raises what the device reports; this thread must not end of it."""
    submitted: list[LayerReady] = []

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    waits = iter([broken, lambda: None])
    computed = ComputedLayers(lambda: next(waits), submitted.append, 2)
    for layer in range(2):
        computed.announce([ready(1, layer)])
    until(lambda: bool(submitted))
    assert submitted == [ready(1, 1)]
    assert "layer 0 was not announced" in caplog.text and "illegal memory" in caplog.text


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
    sending = [KVSending(1, 7, 1), KVSending(3, 8, 2)]
    hook = rank._layer_hook(ExecuteStep(StepPlan.of(1, steps), sending))
    assert hook is not None
    hook(0)
    assert [type(each) for each in plane.told] == [LayerReady, LayerReady]
    at_once = list(plane.told)
    plane.told.clear()
    stream = FakeStream()
    rank._computed_layers = ComputedLayers(stream.mark, plane.submit, 2)
    hook = rank._layer_hook(ExecuteStep(StepPlan.of(2, steps), sending))
    assert hook is not None
    for layer in (0, 1):
        hook(layer)
    assert len(stream.events) == 2 and not plane.told
    stream.compute(0)
    until(lambda: len(plane.told) == 2)
    assert plane.told == at_once
    first, second = plane.told
    assert (first.transfer_id, first.first_token, first.end_token) == (7, 10, 12)
    assert (second.transfer_id, second.attempt) == (8, 2)
    stream.compute(1)
