"""The figures of an attack, from streams with tokens at given times."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.datasets.random_prompts import IdPrompts
from tandem.bench.interference import Attack, Scene, attack, summary

PROMPTS = IdPrompts(range(1000))


class ServerCourse:
    """A server and its time. Victims get a token every 10 ms, but none in the seconds of ``stall``
    after the long prompt, whose first token comes after 1 s (0.5 s without victims)."""

    def __init__(self, stall: tuple[float, float] = (0.05, 0.25)) -> None:
        self.time = 100.0
        self.stall = stall
        self.stalled = (0.0, 0.0)
        self.victims: list[MeasuredResponse] = []
        self.bodies: list[dict[str, Any]] = []

    def now(self) -> float:
        return self.time

    def body(self, prompt: list[int], max_tokens: int, **more: Any) -> bytes:
        self.bodies.append({"prompt": prompt, "max_tokens": max_tokens, **more})
        return b"%d" % max_tokens

    async def ask(self, body: bytes, response: MeasuredResponse | None = None) -> MeasuredResponse:
        if response is not None:
            self.victims.append(response)
            await asyncio.Event().wait()
        response = MeasuredResponse(sent_at=self.time, finished=True)
        if self.victims:
            self.stalled = self.time + self.stall[0], self.time + self.stall[1]
        await self.sleep(1.0 if self.victims else 0.5)
        response.arrivals = response.times = [self.time]
        return response

    async def sleep(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.01))):
            self.time = round(self.time + 0.01, 6)
            if not self.stalled[0] <= self.time < self.stalled[1]:
                for victim in self.victims:
                    victim.times.append(self.time)
        await YIELD(0)


YIELD = asyncio.sleep


async def test_an_attack_is_measured_from_the_long_prompt_to_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = ServerCourse()
    monkeypatch.setattr(asyncio, "sleep", course.sleep)
    monkeypatch.setattr(time, "perf_counter", course.now)
    server: Any = course
    result = await attack(server, PROMPTS, "x", Scene(victims=2, prompt_tokens=30))
    assert result.own_speed == pytest.approx(100) and result.step == pytest.approx(0.01)
    assert result.shares == pytest.approx((0.8, 0.8))
    assert result.longest_gap == pytest.approx(0.21)
    assert result.longest_gap_before == pytest.approx(0.01)
    assert (result.alone_first_token, result.first_token) == pytest.approx((0.5, 1.0))
    assert [len(one["prompt"]) for one in course.bodies] == [30, 16, 16, 30, 16, 16]
    assert course.bodies[0]["prompt"] != course.bodies[3]["prompt"]
    assert course.bodies[1:3] == course.bodies[4:]  # the same streams without an attack


class GrowingContexts(ServerCourse):
    """A victim needs 10 ms for each of the first tokens, and 20 from the hundredth on; nothing is
    stalled by the long prompt."""

    async def sleep(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.01))):
            self.time = round(self.time + 0.01, 6)
            for victim in self.victims:
                if len(victim.times) < 100 or round(100 * self.time) % 2:
                    victim.times.append(self.time)
        await YIELD(0)


async def test_a_stream_that_its_context_slows_down_keeps_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = GrowingContexts()
    monkeypatch.setattr(asyncio, "sleep", course.sleep)
    monkeypatch.setattr(time, "perf_counter", course.now)
    server: Any = course
    result = await attack(server, PROMPTS, "x", Scene(prompt_tokens=30, alone_seconds=0.1))
    assert 50 < result.own_speed < 99
    assert result.worst_share == pytest.approx(1, rel=0.02)


async def test_a_victim_that_gets_no_token_has_a_speed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = ServerCourse(stall=(0.0, 1.0))
    monkeypatch.setattr(asyncio, "sleep", course.sleep)
    monkeypatch.setattr(time, "perf_counter", course.now)
    server: Any = course
    result = await attack(server, PROMPTS, "x", Scene(prompt_tokens=30))
    assert result.own_speed == pytest.approx(100)
    assert result.worst_share == pytest.approx(0, abs=0.011)


def test_a_summary_has_medians_over_the_rounds() -> None:
    def of(share: float, late: float) -> Attack:
        return Attack(
            prompt_tokens=9,
            alone_first_token=1.0,
            first_token=late,
            shares=(share, 1.0),
            longest_gap=0.08,
            longest_gap_before=0.02,
            step=0.01,
            own_speed=50.0,
        )

    result = summary([of(0.5, 3.0), of(0.7, 2.0), of(0.1, 9.0)])
    assert (result["share_kept"], result["attacker_ttft_over_alone"]) == (0.5, 3.0)
    assert result["longest_gap_over_allowed"] == pytest.approx(2.0)
    assert [one["worst_share"] for one in result["rounds"]] == [0.5, 0.7, 0.1]
