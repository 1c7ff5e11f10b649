"""Requests and tokens of a key in any minute."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.router.access.key_usage import KeyUsage
from tandem.router.access.moving_windows import MinuteLimits, OwnWindows
from tandem.router.access.rate_limits import RateLimits, duration
from tandem.router.access.shared_windows import SharedWindows
from tandem.router.options import RouterOptions
from tandem.tests.router.support import Cluster, cluster, until
from tandem.tests.support.clock import SteppedClock


def test_an_amount_counts_for_a_minute() -> None:
    clock = SteppedClock(1000.0)
    limits = MinuteLimits(10, clock)
    for amount in (3, 5):
        assert limits.take("a", 10, amount)
        clock.now += 20
    assert not limits.take("a", 10, 3)
    level = limits.level("a", 10, 3)
    assert (level.remaining, level.wait, level.reset) == (2, 20.5, 40.5)
    assert limits.take("b", 10, 10) and limits.take("a", 10, 2)
    clock.now += 20.4
    assert not limits.take("a", 10, 1)
    clock.now += 0.1
    assert limits.take("a", 10, 3) and not limits.take("a", 10, 1)


def test_a_reservation_ends_with_what_was_used() -> None:
    clock = SteppedClock(1000.0)
    limits = MinuteLimits(10, clock)

    def reserved(amount: int) -> Any:
        reservation = limits.take("a", 100, amount)
        assert reservation
        return reservation

    first, second, third = reserved(40), reserved(40), reserved(20)
    assert not limits.take("a", 100, 1)
    limits.settle(first, 0)
    limits.settle(second, 15)
    limits.settle(third, 25)
    assert limits.level("a", 100).remaining == 60
    clock.now += 61
    long = reserved(100)
    clock.now += 61  # its tokens do not count any more, and those beyond them do
    limits.settle(long, 30)
    assert limits.level("a", 100).remaining == 100
    limits.settle(reserved(50), 130)
    assert limits.level("a", 100).remaining == 0 and limits.level("a", 100).wait > 0


def test_what_is_kept_is_bounded() -> None:
    clock = SteppedClock(1000.0)
    windows = OwnWindows(3, clock)
    limits = MinuteLimits(3, clock, windows)
    for number in range(10_000):
        clock.now += 0.01
        limits.take(f"key-{number % 20}", 1000, 1)
    assert len(windows._windows) == 3
    for _ in range(10_000):
        clock.now += 0.1
        limits.take("busy", 10**9, 100)
    with windows.opened("busy") as busy:
        assert len(busy.halves) <= 122


def test_limits_hold_for_all_processes_that_share_a_file(tmp_path: Path) -> None:
    clock = SteppedClock(1000.0)
    first, second = (
        MinuteLimits(9, clock, SharedWindows(tmp_path / "limits", 16, clock)) for _ in range(2)
    )
    reserved = first.take("a", 100, 60)
    assert reserved is not None and second.take("a", 100, 41) is None
    assert second.take("b", 100, 100) is not None
    clock.now += 30
    assert second.take("a", 100, 40) is not None
    first.settle(reserved, 10)
    assert second.level("a", 100) == first.level("a", 100)
    assert first.level("a", 100).remaining == 50
    clock.now += 31
    assert second.level("a", 100).remaining == 60
    for number in range(100):  # more names than slots
        assert first.take(f"key-{number}", 1, 1) is not None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (7.656, "7.66s"), (60, "1m0s"), (60.5, "1m0.5s")],
)
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_router_without_limits_does_not_import_the_library() -> None:
    made = RateLimits(RouterOptions(api_key="x"), KeyUsage())
    assert made._limits is None


# ---- over HTTP ----------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(c: Cluster, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 3, **fields}
    return await c.client.post("/v1/completions", json=body, headers=bearer(key))


async def test_requests_of_a_key_are_limited_in_the_shape_of_each_api(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, api_key="one: a,one: a2,two: b rpm=1,c", admin_api_key="root",
        requests_per_minute=3,
    ) as c:  # fmt: skip
        for number, key in enumerate(("a", "a2", "a")):
            answer = await complete(c, key, stream=number == 1)
            assert answer.status_code == 200
            shown = answer.headers
            assert shown["x-ratelimit-limit-requests"] == "3"
            assert shown["x-ratelimit-remaining-requests"] == str(2 - number)
            assert shown["x-ratelimit-reset-requests"].startswith("1m0")
            assert "x-ratelimit-limit-tokens" not in shown
        refused = await complete(c, "a2")
        assert refused.status_code == 429 and 55 <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert (
            "key 'one' on requests per min (RPM): Limit 3, Used 3, Requested 1." in error["message"]
        )
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        given = {"x-api-key": "a"}
        anthropic = await c.client.post("/v1/messages", json=body, headers=given)
        assert anthropic.status_code == 429
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        tokens = await c.client.post("/tokenize", json={"prompt": "x"}, headers=bearer("a"))
        assert tokens.status_code == 429
        assert (await c.client.get("/v1/models", headers=bearer("a"))).status_code == 200
        assert [(await complete(c, "b")).status_code for _ in range(2)] == [200, 429]
        assert {(await complete(c, "root")).status_code for _ in range(5)} == {200}
        with pytest.raises(openai.RateLimitError):
            async with openai.AsyncOpenAI(
                base_url=c.url + "/v1", api_key="a", max_retries=0
            ) as client:
                await client.completions.create(model="tiny", prompt="x")
        usage = (await c.client.get("/v1/usage", headers=bearer("root"))).json()["data"]
        assert {entry["key"]: entry["limited"]["requests"] for entry in usage} == {
            "admin-1": 0, "one": 4, "two": 1,
        }  # fmt: skip
        page = c.router.metrics.render().decode()
        assert 'tandem_key_requests_limited_total{key="one",limit="requests"} 4.0' in page


async def test_tokens_are_reserved_and_given_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="a", tokens_per_minute=100) as c:
        release = asyncio.Event()
        talk = c.node._talk

        async def slowly(request: Any, context: Any) -> Any:
            async for event in talk(request, context):
                yield event
                if event.WhichOneof("event") == "admitted":
                    await release.wait()

        c.node.script = slowly
        first = asyncio.create_task(complete(c, "a", max_tokens=90))
        await until(lambda: c.node.active == 1)
        refused = await complete(c, "a", max_tokens=90)
        assert refused.status_code == 429
        error = refused.json()["error"]
        reserved = 90 + len(c.encode("hi"))
        assert error["type"] == "tokens"
        assert f"Used {reserved}, Requested {reserved}" in error["message"]
        release.set()
        answer = await first
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - reserved)
        used = answer.json()["usage"]["total_tokens"]
        again = await complete(c, "a", max_tokens=90)
        assert again.status_code == 200
        assert again.headers["x-ratelimit-remaining-tokens"] == str(100 - used - reserved)


async def test_a_request_that_fails_gives_everything_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="a", tokens_per_minute=100) as c:
        await c.node.stop()
        c.nodes.clear()
        for _ in range(3):
            assert (await complete(c, "a", max_tokens=99)).status_code == 503


async def test_an_output_without_a_limit_is_not_refused_for_ever(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="a", tokens_per_minute=30) as c:
        assert (await complete(c, "a", max_tokens=400)).status_code == 200
        too_long = await complete(c, "a", prompt="hi " * 40)
        assert too_long.status_code == 429 and "retry-after" not in too_long.headers
        assert "Request too large" in too_long.json()["error"]["message"]
