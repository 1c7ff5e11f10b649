from __future__ import annotations

import asyncio

import pytest

from tandem.shared.process.uninterrupted import uninterrupted


async def test_work_reaches_its_end_however_often_its_caller_is_cancelled() -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        begun.set()
        await may_end.wait()
        ended.append(True)

    caller = asyncio.create_task(uninterrupted(work()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        await uninterrupted(work())
