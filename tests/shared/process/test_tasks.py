"""Waiting for asyncio's tasks."""

from __future__ import annotations

import asyncio

import pytest

from tandem.shared.process.tasks import first_end, uninterrupted


async def test_work_reaches_its_end_however_often_its_caller_is_cancelled() -> None:
    started, may_end, results = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        started.set()
        await may_end.wait()
        results.append(True)

    caller = asyncio.create_task(uninterrupted(work()))
    await started.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert results


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        await uninterrupted(work())


async def test_the_error_of_the_task_that_ends_first_is_raised() -> None:
    async def fail() -> None:
        raise OSError("broken")

    async def end() -> None:
        return

    running = asyncio.create_task(asyncio.Event().wait())
    try:
        await first_end([running, asyncio.create_task(end())])
        with pytest.raises(OSError, match="broken"):
            await first_end([running, asyncio.create_task(fail())])
        assert not running.done()
    finally:
        running.cancel()
