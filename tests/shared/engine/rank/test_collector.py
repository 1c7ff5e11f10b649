"""Replies to steps that a device still computes, in any order of launches and ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from tandem.shared.engine.plan import COMPUTATION, VOID, StepFailure, StepResult
from tandem.shared.engine.rank.collector import Collector
from tandem.shared.engine.rank.runner import LaunchedStep
from tandem.shared.models.parallel import Collectives

Outcome = StepResult | StepFailure


class Device:
    """Computes the steps when the test lets it, as a GPU that is behind the host."""

    def __init__(self, broken: frozenset[int] = frozenset(), *, waits: bool = True) -> None:
        self.broken = broken
        self.unsendable: frozenset[int] = frozenset()
        self.computes = threading.Semaphore(0)
        self.replies: queue.SimpleQueue[tuple[Outcome, int]] = queue.SimpleQueue()
        self.collector = Collector(self.collect, self.reply, self.failure, waits=waits)

    def collect(self, step: LaunchedStep) -> StepResult:
        assert self.computes.acquire(timeout=20)
        if step.step in self.broken:
            raise RuntimeError("an illegal address")
        return StepResult(step.step)

    def reply(self, outcome: Outcome, collectives: Collectives) -> None:
        if isinstance(outcome, StepResult) and outcome.step in self.unsendable:
            raise OverflowError("a message of 5 GB")
        self.replies.put((outcome, collectives.started))

    def failure(self, step: int, error: Exception) -> StepFailure:
        return StepFailure(COMPUTATION, f"{step}: {error}")

    def launch(self, number: int, *, ahead: bool, collectives: int = 0) -> None:
        step = LaunchedStep(number, ahead, 0.0, [], None)
        self.collector.put(step, Collectives(collectives, collectives))

    def next(self) -> tuple[Outcome, int]:
        return self.replies.get(timeout=20)


def test_a_step_is_launched_before_the_one_before_has_ended() -> None:
    device = Device()
    device.launch(1, ahead=False, collectives=3)
    device.launch(2, ahead=True, collectives=6)
    with pytest.raises(queue.Empty):
        device.replies.get(timeout=0.01)
    for number in (1, 2):
        device.computes.release()
        outcome, collectives = device.next()
        assert isinstance(outcome, StepResult) and outcome.step == number
        assert collectives == 3 * number, "counted at the launch, not at the reply"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("sent", [True, False])
def test_a_step_on_top_of_one_that_broke_on_the_device_is_void(sent: bool, waits: bool) -> None:
    """Or whose result cannot be sent."""
    device = Device(frozenset({1} if sent else {}), waits=waits)
    device.unsendable = frozenset({1})
    device.computes.release(5)
    kinds: list[Callable[[], None]] = [
        lambda: device.launch(1, ahead=False),
        lambda: device.launch(2, ahead=True),
        lambda: device.launch(3, ahead=False),
        lambda: device.launch(4, ahead=True),
    ]
    for launch in kinds:
        launch()
    outcomes = [device.next()[0] for _ in kinds]
    reason = "an illegal address" if sent else "a message of 5 GB"
    assert outcomes[0] == StepFailure(COMPUTATION, f"1: {reason}")
    assert isinstance(outcomes[1], StepFailure) and outcomes[1].cause == VOID
    assert [isinstance(each, StepResult) for each in outcomes[2:]] == [True, True]


def test_a_launch_that_failed_is_reported_in_its_turn() -> None:
    device = Device()
    device.launch(1, ahead=False)
    device.collector.put(StepFailure(COMPUTATION, "no memory"), Collectives())
    assert device.replies.empty()
    device.computes.release()
    assert isinstance(device.next()[0], StepResult)
    assert device.next()[0] == StepFailure(COMPUTATION, "no memory")


def test_without_a_thread_the_reply_is_sent_at_once() -> None:
    device = Device(waits=False)
    device.computes.release()
    device.launch(1, ahead=False, collectives=2)
    outcome, collectives = device.replies.get_nowait()
    assert isinstance(outcome, StepResult) and collectives == 2
    device.collector.put(StepFailure(COMPUTATION, "no memory"), Collectives())
    assert device.replies.get_nowait()[0] == StepFailure(COMPUTATION, "no memory")
