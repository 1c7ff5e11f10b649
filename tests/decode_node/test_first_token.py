"""The breakdown of the time to first token: each moment belongs to one phase."""

from __future__ import annotations

import pytest

from tandem.decode_node.first_token import FirstTokenClock
from tandem.proto import tandem_pb2 as pb


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def phases(clock: FirstTokenClock) -> dict[str, float]:
    return {
        field.name.removesuffix("_seconds"): round(value, 6)
        for field, value in clock.durations.ListFields()
    }


def test_a_prompt_that_another_node_computed() -> None:
    time = Time()
    clock = FirstTokenClock(time)
    time.now += 0.7  # waiting for blocks
    clock.reserved()
    time.now += 1.0  # a node that does not answer
    clock.failed()
    time.now += 0.2
    clock.greeted()
    time.now += 3.0
    clock.received(pb.OpenDone(compute_seconds=2.0, exposed_seconds=0.5))
    time.now += 0.3  # including 0.1 until the engine starts it
    clock.sampled(time.now - 0.2, remote=True)
    expected = {"failed": 1, "greet": 0.2, "queue": 1.3, "prefill": 2, "transfer": 0.5, "step": 0.2}
    assert phases(clock) == expected
    assert sum(phases(clock).values()) == pytest.approx(time.now - 100.0)


def test_a_prompt_that_was_computed_here() -> None:
    time = Time()
    clock = FirstTokenClock(time)
    time.now += 2.0
    clock.sampled(100.5, remote=False)
    assert phases(clock) == {"queue": 0.5, "prefill": 1.5}


@pytest.mark.parametrize("started_at", [0.0, 99.0, 1e9])
@pytest.mark.parametrize(
    "account", [None, pb.OpenDone(compute_seconds=1e9, exposed_seconds=-5), pb.OpenDone()]
)
def test_phases_add_up_whatever_a_peer_says(account: pb.OpenDone | None, started_at: float) -> None:
    time = Time()
    clock = FirstTokenClock(time)
    time.now += 3.0
    clock.received(account)
    time.now += 1.0
    clock.sampled(started_at, remote=True)
    assert sum(phases(clock).values()) == pytest.approx(4.0)
    assert min(phases(clock).values()) >= 0
