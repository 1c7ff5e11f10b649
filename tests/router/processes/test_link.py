"""The link between a keeper and a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.router.processes.process_link import Link, LinkClosedError, Topic
from tandem.shared.errors import UnavailableError


class Ends:
    """Both ends, and what was told to the second."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.asked = asyncio.Event()
        self.first = Link({}, {})
        topics = {Topic.PAGE: self._answer, Topic.USAGE: self._refuse, Topic.SERIES: self._wait}
        self.second = Link({Topic.HEARTBEAT: self.told.append}, topics)

    async def _answer(self, body: bytes) -> bytes:
        return b"told: " + b",".join(self.told) + body

    async def _refuse(self, body: bytes) -> bytes:
        raise UnavailableError("not now")

    async def _wait(self, body: bytes) -> bytes:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def linked() -> AsyncIterator[Ends]:
    ends, pair = Ends(), socket.socketpair()
    for each in pair:
        each.setblocking(False)
    running = [
        asyncio.create_task(link.run(each))
        for link, each in zip((ends.first, ends.second), pair, strict=True)
    ]
    await ends.first.opened.wait()
    yield ends
    ends.first.close()
    await asyncio.gather(*running)


async def test_what_was_told_is_known_when_the_next_question_is_answered() -> None:
    async with linked() as ends:
        for body in (b"a", b"b" * 100_000, b""):
            ends.first.tell(Topic.HEARTBEAT, body)
        assert await ends.first.ask(Topic.PAGE, b"!") == b"told: a," + b"b" * 100_000 + b",!"


async def test_a_refusal_and_silence_are_errors() -> None:
    async with linked() as ends:
        with pytest.raises(LinkClosedError, match="not now"):
            await ends.first.ask(Topic.USAGE)
        with pytest.raises(LinkClosedError, match="does not answer"):
            await ends.first.ask(Topic.SERIES, seconds=0.01)


async def test_questions_fail_when_the_other_end_closes() -> None:
    async with linked() as ends:
        question = asyncio.create_task(ends.first.ask(Topic.SERIES))
        await ends.asked.wait()
        ends.second.close()
        with pytest.raises(LinkClosedError):
            await question
        ends.first.tell(Topic.HEARTBEAT)
        with pytest.raises(LinkClosedError):
            await ends.first.ask(Topic.PAGE)
