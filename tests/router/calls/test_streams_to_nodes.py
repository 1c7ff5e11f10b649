"""All calls of a node share one stream; each still ends, fails and waits by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import CAPABILITIES, STREAM
from tandem.router.calls import node_stream
from tandem.router.calls.multiplexed_call import MultiplexedCall
from tandem.router.calls.node_events import CallFailedError, PlainTokens
from tandem.router.calls.node_stream import fits_stream
from tandem.tests.router.node_scripts import stuck
from tandem.tests.router.support import admitted, cluster, events, finished, tokens_event, until


async def test_calls_of_a_node_share_a_stream(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.delay = 0.01
        answers = await asyncio.gather(*(c.chat(stream=number % 2 == 0) for number in range(6)))
        assert all("hello" in answer.text for answer in answers)
        assert len(c.node.requests) == 6 and len(c.node.streams) == 1


async def test_nodes_without_streams_are_called_one_by_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        older = await c.add(capabilities=CAPABILITIES - {STREAM})
        answers = await asyncio.gather(c.chat(stream=True), c.chat(n=2))
        assert events(answers[0].text)[-1] == "[DONE]"
        assert len(answers[1].json()["choices"]) == 2
        assert len(older.requests) == 2 and older.streams == []


async def test_requests_with_large_events_have_a_call_of_their_own(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_logprobs=100) as c:
        assert (await c.complete(logprobs=100, max_tokens=2)).status_code == 200
        assert c.node.streams == [] and len(c.node.requests) == 1
        assert (await c.complete(logprobs=20, max_tokens=2)).status_code == 200
        assert len(c.node.streams) == 1 and len(c.node.requests) == 2


def test_long_answers_have_a_flow_control_of_their_own() -> None:
    def fits(**sampling: int) -> bool:
        return fits_stream(pb.GenerateRequest(prompt=[1] * 9, sampling=pb.Sampling(**sampling)))  # type: ignore[arg-type]

    assert fits(max_tokens=1_000_000) and fits(max_tokens=10_000, logprobs=20)
    assert not fits(max_tokens=100_000, n=16)
    assert not fits(max_tokens=100_000, logprobs=20)
    assert not fits(max_tokens=1, prompt_logprobs=100)


async def test_a_client_that_goes_away_ends_its_call_alone(tmp_path: Path) -> None:
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
        gone, stays = (asyncio.create_task(c.chat(stream=True)) for _ in range(2))
        await until(lambda: c.node.active == 2)
        gone.cancel()
        await until(lambda: c.node.active == 1)
        go_on.set()
        assert events((await stays).text)[-1] == "[DONE]"
        assert len(c.node.streams) == 1


async def test_calls_of_a_broken_stream_are_continued_elsewhere(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.node.script = stuck
        streamed, unary = (asyncio.create_task(c.chat(stream=stream)) for stream in (True, False))
        await c.first_tokens(2)
        other = await c.add("other")
        c.node.streams[0]._cut()
        assert events((await streamed).text)[-1] == "[DONE]"
        assert (await unary).json()["tandem"]["decode_nodes"] == ["decode-0", "other"]
        assert [len(request.resume) for request in other.requests] == [1, 1]


async def test_a_stream_without_calls_ends_and_the_next_call_opens_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_stream, "IDLE_SECONDS", 0.0)
    async with cluster(tmp_path) as c:
        for count in (1, 2):
            assert (await c.chat()).status_code == 200
            assert len(c.node.streams) == count
            await until(lambda: c.node.open_streams == 0)


def multiplexed(max_tokens: int) -> tuple[MultiplexedCall, list[MultiplexedCall]]:
    """A call, and the list that it is put into when it is cancelled."""
    cancelled: list[MultiplexedCall] = []
    sampling = pb.Sampling(max_tokens=max_tokens, n=2)
    request = pb.GenerateRequest(sampling=sampling)
    return MultiplexedCall(request, cancelled.append, reuses=False), cancelled


async def test_tokens_that_wait_are_read_together_and_in_order() -> None:
    call, _ = multiplexed(100)
    for token in range(3):
        call.add_token(0, token)
        call.add_token(1, token + 10)
    call.add(finished(0))
    call.add_token(1, 13)
    call.end()
    first, second, end, last = await call.read()
    assert (first, second) == (PlainTokens(0, [0, 1, 2]), PlainTokens(1, [10, 11, 12]))
    assert end == finished(0) and last == PlainTokens(1, [13])
    assert list(await call.read()) == []


async def test_a_node_cannot_make_more_wait_than_the_answer_may_have() -> None:
    call, cancelled = multiplexed(10)
    for token in range(1000):
        call.add_token(0, token)
    assert cancelled == [call]
    kept = [token for event in await call.read() for token in event.tokens]  # type: ignore[union-attr]
    assert kept == list(range(len(kept))) and len(kept) < 200
    with pytest.raises(CallFailedError):
        await call.read()
