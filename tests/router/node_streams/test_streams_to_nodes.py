"""All requests to a node share one stream; each ends, fails and waits independently."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.errors import NodeError
from tandem.router.node_streams import remote_request, stream
from tandem.router.node_streams.events import PlainTokens
from tandem.router.node_streams.remote_request import RemoteRequest
from tandem.tests.router.node_scripts import stuck
from tandem.tests.router.support import admitted, cluster, events, finished, tokens_event, until


async def test_requests_to_a_node_share_a_stream(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.delay = 0.01
        responses = await asyncio.gather(*(c.chat(stream=number % 2 == 0) for number in range(6)))
        assert all("hello" in response.text for response in responses)
        assert len(c.node.requests) == 6 and len(c.node.streams) == 1


async def test_a_client_that_leaves_ends_only_its_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        go_on = asyncio.Event()

        async def script(request: pb.GenerateRequest, context: Any) -> Any:
            yield admitted()
            yield tokens_event(0, [5])
            await go_on.wait()
            async for event in c.node._talk(request, context):
                if not event.HasField("admitted"):
                    yield event

        c.node.script = script
        leaving, stays = (asyncio.create_task(c.chat(stream=True)) for _ in range(2))
        await until(lambda: c.node.active == 2)
        leaving.cancel()
        await until(lambda: c.node.active == 1)
        go_on.set()
        assert events((await stays).text)[-1] == "[DONE]"
        assert len(c.node.streams) == 1


async def test_requests_of_a_broken_stream_are_continued_elsewhere(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = stuck
        streamed, unary = (asyncio.create_task(c.chat(stream=stream)) for stream in (True, False))
        await c.first_tokens(2)
        other = await c.add("other")
        c.node.streams[0]._cut()
        assert events((await streamed).text)[-1] == "[DONE]"
        assert (await unary).json()["tandem"]["decode_nodes"] == ["decode-0", "other"]
        assert [len(request.resume) for request in other.requests] == [1, 1]


async def test_a_stream_without_requests_ends_and_the_next_request_opens_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "IDLE_SECONDS", 0.0)
    async with cluster(tmp_path) as c:
        for count in (1, 2):
            assert (await c.chat()).status_code == 200
            assert len(c.node.streams) == count
            await until(lambda: c.node.open_streams == 0)


def multiplexed() -> tuple[RemoteRequest, list[RemoteRequest]]:
    """A request, and the list to which it is added when cancelled."""
    cancelled: list[RemoteRequest] = []
    request = pb.GenerateRequest(prompt=[1] * 4, sampling=pb.Sampling(prompt_logprobs=9))
    return RemoteRequest(request, cancelled.append, reuses=False), cancelled


async def test_tokens_that_wait_are_read_together_and_in_order() -> None:
    remote, _ = multiplexed()
    for token in range(3):
        remote.add_token(0, token)
        remote.add_token(1, token + 10)
    remote.add(finished(0))
    remote.add_token(1, 13)
    remote.end()
    first, second, end, last = await remote.read()
    assert (first, second) == (PlainTokens(0, [0, 1, 2]), PlainTokens(1, [10, 11, 12]))
    assert end == finished(0) and last == PlainTokens(1, [13])
    assert list(await remote.read()) == []


async def test_a_request_fails_once_too_much_is_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_request, "MAX_UNREAD", 10_000)
    remote, cancelled = multiplexed()
    for _ in range(3):  # tokens that were read no longer count
        for token in range(3000):
            remote.add_token(0, token)
            remote.add_token(1, token)
        for _ in range(90):
            remote.add(tokens_event(0, [7], 40))
        while remote._events:
            assert 0 < len(await remote.read()) < 2 * remote_request.MAX_READ / 41
        assert remote._unread == 0
    assert cancelled == []
    for _ in range(244):
        remote.add(tokens_event(0, [7], 40))
    assert cancelled == [], "logprobs of the prompt come on top"
    remote.add(tokens_event(0, [7], 40))
    assert cancelled == [remote]
    with pytest.raises(NodeError, match="reads the response too slowly"):
        await remote.read()
