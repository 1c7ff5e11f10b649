"""Sending requests at their planned times, whether or not earlier ones have been answered.

A client that waits for answers sends less to a server that stalls, and so does not see what its
users would have seen (coordinated omission). Here a request that is sent late, because the client
or its limit of concurrent requests was in the way, carries the delay in its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from .client.measured_response import MeasuredResponse

Send = Callable[[int, MeasuredResponse], Awaitable[object]]
Finished = Callable[[MeasuredResponse], None]


class Clock(Protocol):
    """Time as the load sees it."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None: ...


class WallClock:
    """The clock of the answers."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(when - time.perf_counter())


async def send_all(
    times: Sequence[float],
    send: Send,
    finished: Finished = lambda _: None,
    *,
    max_concurrency: int | None = None,
    clock: Clock | None = None,
) -> list[MeasuredResponse]:
    """Send request i at ``times[i]`` seconds from now; returns all answers, in order."""
    clock = clock or WallClock()
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    begin = clock.now()
    answers = [MeasuredResponse(planned=begin + at) for at in times]

    async def one(index: int, answer: MeasuredResponse) -> None:
        async with AsyncExitStack() as stack:
            if slots:
                await stack.enter_async_context(slots)
            await send(index, answer)
        finished(answer)

    async with asyncio.TaskGroup() as group:
        for index, answer in enumerate(answers):
            if times[index] > 0:
                await clock.sleep_until(answer.planned)
            group.create_task(one(index, answer))
    return answers
