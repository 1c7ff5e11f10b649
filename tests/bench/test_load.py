"""Requests are sent at their planned times, whatever happens to earlier ones."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from math import inf

import pytest

from tandem.bench.arrivals import Traffic, arrival_times
from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.open_loop import send_all
from tandem.shared.errors import UsageError


class JumpingClock:
    """A clock that jumps to the next time that a task waits for, once nothing else runs."""

    def __init__(self) -> None:
        self.time = 0.0
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    async def sleep_until(self, when: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((when, future))
        await future

    async def run(self, work: asyncio.Task) -> None:
        while not work.done():
            for _ in range(10):
                await asyncio.sleep(0)
            if self._waiting:
                self._waiting.sort(key=lambda one: one[0])
                self.time, future = self._waiting.pop(0)
                future.set_result(None)


async def queue_times(times: list[float], seconds: float, limit: int | None = None) -> list[float]:
    """Queue times of requests whose responses take ``seconds``."""
    clock = JumpingClock()

    async def send(index: int, response: MeasuredResponse) -> None:
        response.sent_at = clock.now()
        await clock.sleep_until(clock.now() + seconds)

    work = asyncio.create_task(
        send_all(times, send, lambda response: None, max_concurrency=limit, clock=clock)
    )
    await clock.run(work)
    return [round(response.queue_time, 6) for response in work.result()]


async def test_a_server_that_stalls_gets_its_requests_on_time() -> None:
    assert await queue_times([0.0, 0.1, 0.2, 0.3], seconds=100) == [0, 0, 0, 0]


async def test_a_limit_of_requests_delays_them_and_says_so() -> None:
    assert await queue_times([0.0, 0.1, 0.2, 0.3], seconds=1, limit=2) == [0, 0, 0.8, 0.8]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0, inf])
def test_a_rate_is_kept_on_the_whole(burstiness: float) -> None:
    times = arrival_times(Traffic(request_rate=5, burstiness=burstiness), 100, seed=1)
    assert times == sorted(times) and times[-1] == pytest.approx(20)
    assert times == arrival_times(Traffic(request_rate=5, burstiness=burstiness), 100, seed=1)


def test_bursts_are_less_regular() -> None:
    def spread(burstiness: float) -> float:
        times = arrival_times(Traffic(request_rate=5, burstiness=burstiness), 500, seed=1)
        gaps = [b - a for a, b in pairwise(times)]
        return max(gaps) - min(gaps)

    assert spread(0.2) > spread(1.0) > spread(10.0) > spread(inf)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_the_first_rate_to_the_last(strategy: str) -> None:
    ramp = Traffic(ramp_up=strategy, first_rate=2, last_rate=8, burstiness=inf)
    assert (ramp.rate(0, 50), ramp.rate(49, 50)) == (2, pytest.approx(8))
    times = arrival_times(ramp, 50, seed=0)
    assert times[1] - times[0] > 2 * (times[-1] - times[-2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_rate": 1, "first_rate": 1, "last_rate": 2},
        {"first_rate": 1},
        {"first_rate": 2, "last_rate": 1},
        {"first_rate": 0, "last_rate": 1},
    ],
)
def test_a_contradicting_ramp_is_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match="--ramp-up"):
        Traffic(ramp_up="linear", **wrong)


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert arrival_times(Traffic(), 3, seed=0) == [0, 0, 0]
