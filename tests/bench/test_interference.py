"""The figures of an attack, from streams whose tokens came at given times."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tandem.bench.client.measured_answer import MeasuredAnswer
from tandem.bench.datasets.random_prompts import IdPrompts
from tandem.bench.interference import Attack, Scene, attack, summary

PROMPTS = IdPrompts(range(1000))


class ServerCourse:
    """A server and its time. Victims get a token every 10 ms, and none for 0.2 s from 50 ms after
    the long prompt on, which is answered after 1 s (0.5 s if it is alone)."""

    def __init__(self) -> None:
        self.time = 100.0
        self.stalled = (0.0, 0.0)
        self.victims: list[MeasuredAnswer] = []
        self.asked: list[dict[str, Any]] = []

    def now(self) -> float:
        return self.time

    def body(self, prompt: list[int], max_tokens: int, **more: Any) -> bytes:
        self.asked.append({"prompt": prompt, "max_tokens": max_tokens, **more})
        return b"%d" % max_tokens

    async def ask(self, body: bytes, answer: MeasuredAnswer | None = None) -> MeasuredAnswer:
        if answer is not None:
            self.victims.append(answer)
            await asyncio.Event().wait()
        answer = MeasuredAnswer(sent=self.time, finished=True)
        if self.victims:
            self.stalled = (self.time + 0.05, self.time + 0.25)
        await self.sleep(1.0 if self.victims else 0.5)
        answer.arrivals = answer.times = [self.time]
        return answer

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
    found = await attack(server, PROMPTS, "x", Scene(victims=2, prompt_tokens=30))
    assert found.speed == pytest.approx(100) and found.step == pytest.approx(0.01)
    assert found.shares == pytest.approx((0.8, 0.8))
    assert found.longest_gap == pytest.approx(0.21)
    assert found.longest_gap_before == pytest.approx(0.01)
    assert (found.alone_first_token, found.first_token) == pytest.approx((0.5, 1.0))
    assert [len(one["prompt"]) for one in course.asked] == [30, 16, 16, 30]
    assert course.asked[0]["prompt"] != course.asked[3]["prompt"]


class GrowingContexts(ServerCourse):
    """Victims need 10 ms for a token before the long prompt, 15 during it and 20 after it."""

    async def sleep(self, seconds: float) -> None:
        for tick in range(max(1, round(seconds / 0.01))):
            self.time = round(self.time + 0.01, 6)
            during = self.stalled[0] and self.time < self.stalled[0] + 0.95
            if not self.stalled[0] or tick % 6 in ((0, 2, 3, 5) if during else (1, 3, 5)):
                for victim in self.victims:
                    victim.times.append(self.time)
        await YIELD(0)


async def test_a_stream_that_its_context_slows_down_keeps_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = GrowingContexts()
    monkeypatch.setattr(asyncio, "sleep", course.sleep)
    monkeypatch.setattr(time, "perf_counter", course.now)
    server: Any = course
    found = await attack(server, PROMPTS, "x", Scene(prompt_tokens=30))
    assert (found.speed, found.speed_after) == (pytest.approx(100), pytest.approx(50, rel=0.01))
    assert found.worst_share == pytest.approx(1, rel=0.02)


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
            speed=50.0,
            speed_after=45.0,
        )

    found = summary([of(0.5, 3.0), of(0.7, 2.0), of(0.1, 9.0)])
    assert (found["share_kept"], found["attacker_ttft_over_alone"]) == (0.5, 3.0)
    assert found["longest_gap_over_allowed"] == pytest.approx(2.0)
    assert [one["worst_share"] for one in found["rounds"]] == [0.5, 0.7, 0.1]
