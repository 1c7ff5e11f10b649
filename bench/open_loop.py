"""Requests sent at their planned times, even if earlier ones are still running.

A client that waits for responses sends less to a server that stalls, and so underestimates the
delays of users (coordinated omission). Here the response to a request that was sent late, because
of the client or its limit of concurrent requests, includes the delay.
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
    """The time of a load."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None: ...


class WallClock:
    """The clock of the responses' times."""

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
    """Send request i at ``times[i]`` seconds from now; returns all responses, in order."""
    clock = clock or WallClock()
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    begin = clock.now()
    responses = [MeasuredResponse(planned=begin + at) for at in times]

    async def one(index: int, response: MeasuredResponse) -> None:
        async with AsyncExitStack() as stack:
            if slots:
                await stack.enter_async_context(slots)
            await send(index, response)
        finished(response)

    async with asyncio.TaskGroup() as group:
        for index, response in enumerate(responses):
            if times[index] > 0:
                await clock.sleep_until(response.planned)
            group.create_task(one(index, response))
    return responses
