"""Rate limits of a key: requests and tokens per minute."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakeredis
import httpx
import openai
import pytest

from tandem.router.access.key_usage import KeyUsage
from tandem.router.access.minute_counts import MinuteCounts, Window
from tandem.router.access.rate_limits import RateLimits, duration
from tandem.router.errors import ApiError
from tandem.router.http.exchange import KeyOwner
from tandem.router.options import RouterOptions
from tandem.shared.errors import UnavailableError, UsageError
from tandem.tests.router.support import Cluster, cluster, until


class Clock:
    """The clock of the storage in memory."""

    def __init__(self) -> None:
        self.now = 6000.0  # the start of a window

    def time(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("limits.aio.storage.memory.time", clock)
    return clock


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    """The URL of a Redis server."""
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    serving.join()


async def test_an_amount_counts_for_a_minute(clock: Clock) -> None:
    minute = MinuteCounts(None)
    for _ in range(10):
        assert await minute.hit("a", 10)
    assert not await minute.hit("a", 10) and await minute.hit("b", 10)
    level = (await minute.window("a")).level(10, 1)
    assert (level.remaining, level.reset) == (0, 120)
    clock.now += level.wait - 0.1
    assert not await minute.hit("a", 10)
    clock.now += 0.2
    assert await minute.hit("a", 10) and not await minute.hit("a", 10)
    clock.now += 120
    assert (await minute.window("a")).level(10).remaining == 10


@pytest.mark.parametrize("amount", [1, 30, 70, 100])
@pytest.mark.parametrize(("early", "late"), [(100, 0), (0, 100), (60, 40), (90, 20)])
async def test_an_amount_fits_after_the_returned_delay(
    clock: Clock, amount: int, early: int, late: int
) -> None:
    minute = MinuteCounts(None)
    clock.now += 20
    await minute.count("a", early)
    clock.now += 50
    await minute.count("a", late)
    clock.now += (await minute.window("a")).level(100, amount).wait + 0.001
    assert (await minute.window("a")).level(100).remaining >= amount


def limited_request(owner: KeyOwner) -> Any:
    return SimpleNamespace(owner=owner, access=SimpleNamespace(tokens=0), headers=[])


async def test_tokens_count_once_they_are_used(clock: Clock) -> None:
    limits = RateLimits(RouterOptions(api_key="x", tokens_per_minute=100), KeyUsage())
    first, second = limited_request(KeyOwner("a")), limited_request(KeyOwner("a"))
    with await limits.reserve(first, 10, 50):
        with pytest.raises(ApiError, match="Used 60, Requested 41"):
            await limits.reserve(second, 1, 40)
        with await limits.reserve(second, 1, 39):
            assert dict(second.headers)[b"x-ratelimit-remaining-tokens"] == b"0"
        first.access.tokens = 15
    await asyncio.gather(*limits._settling)
    assert not limits._reserved
    # Regardless of the minute of their reservation.
    with await limits.reserve(first, 85, 0):
        clock.now += 60
        first.access.tokens = 80
    await asyncio.gather(*limits._settling)
    assert (await limits._minute().window("tokens/a")) == Window(15, 60, 80, 120)


async def test_limits_hold_for_all_routers_that_share_a_storage(redis: str) -> None:
    options = RouterOptions(
        api_key="x", requests_per_minute=3, tokens_per_minute=100, limits_storage=redis
    )
    here, there = (RateLimits(options, KeyUsage()) for _ in range(2))
    client = limited_request(KeyOwner("a"))
    for router in (here, there, here):
        await router.count_request(client)
    with pytest.raises(ApiError, match="Limit 3, Used 3, Requested 1"):
        await there.count_request(client)
    await there.count_request(limited_request(KeyOwner("b")))
    with await here.reserve(client, 10, 50):
        client.access.tokens = 60
    await asyncio.gather(*here._settling)
    with pytest.raises(ApiError, match="Used 60, Requested 41") as refused:
        await there.reserve(client, 1, 40)
    assert 60 <= int(dict(refused.value.headers)[b"retry-after"]) <= 120
    with await there.reserve(client, 1, 39):
        pass
    await asyncio.gather(*there._settling)
    for router in (here, there):
        await router.close()


async def test_requests_are_refused_while_the_limit_storage_fails() -> None:
    options = RouterOptions(
        api_key="x",
        tokens_per_minute=9,
        requests_per_minute=9,
        limits_storage="redis://127.0.0.1:9",
    )
    limits = RateLimits(options, KeyUsage())
    client = limited_request(KeyOwner("a"))
    for operation in (limits.count_request(client), limits.reserve(client, 1, 1)):
        with pytest.raises(UnavailableError, match="cannot be checked: the storage of limits"):
            await operation
    assert not limits._reserved
    await limits.close()


def test_several_routers_without_a_storage_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    RateLimits(RouterOptions(api_key="x", tokens_per_minute=9), KeyUsage())
    assert not caplog.messages
    RateLimits(RouterOptions(api_key="x", tokens_per_minute=9, router_workers=2), KeyUsage())
    (warning,) = caplog.messages
    assert (
        "each of the 2 routers enforces the limits of keys on its own" in warning
        and "--limits-storage" in warning
    )


@pytest.mark.parametrize(
    ("storage", "message"),
    [("memory://", "must begin with redis://, rediss://"), ("redis://h:x", "the URL of a server")],
)
def test_a_storage_that_cannot_be_used_is_refused(storage: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RateLimits(RouterOptions(api_key="x", limits_storage=storage), KeyUsage())
    with pytest.raises(UsageError, match="it needs --api-key"):
        RouterOptions(limits_storage="redis://h")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (7.656, "7.66s"), (60, "1m0s"), (60.5, "1m0.5s")],
)
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_router_without_limits_does_not_import_the_library() -> None:
    limits = RateLimits(RouterOptions(api_key="x"), KeyUsage())
    assert limits._counts is None


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
            response = await complete(c, key, stream=number == 1)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-remaining-requests"] == str(2 - number)
            assert response.headers["x-ratelimit-reset-requests"] == "2m0s"
            assert "x-ratelimit-limit-tokens" not in response.headers
        refused = await complete(c, "a2")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "60"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert (
            "key 'one' on requests per min (RPM): Limit 3, Used 3, Requested 1." in error["message"]
        )
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        headers = {"x-api-key": "a"}
        anthropic = await c.client.post("/v1/messages", json=body, headers=headers)
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


async def test_tokens_are_reserved_and_returned(tmp_path: Path) -> None:
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
        error_info = await complete(c, "a", max_tokens=90)
        assert error_info.status_code == 429
        error = error_info.json()["error"]
        reserved = 90 + len(c.encode("hi"))
        assert error["type"] == "tokens"
        assert f"Used {reserved}, Requested {reserved}" in error["message"]
        release.set()
        response = await first
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
        assert response.headers["x-ratelimit-remaining-tokens"] == str(100 - reserved)
        tokens = response.json()["usage"]["total_tokens"]
        again = await complete(c, "a", max_tokens=90)
        assert again.status_code == 200
        assert again.headers["x-ratelimit-remaining-tokens"] == str(100 - tokens - reserved)


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
