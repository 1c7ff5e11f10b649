"""Threads that parse, render and tokenize what would hold up the event loop.

Bodies of one size class wait for each other only: two clients whose bodies take seconds hold up
nobody's small ones. Within a class clients take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...shared.errors import OverloadedError

# Bodies up to this take a few milliseconds, unless the model's chat template does much: it may loop
# for 0.2 s before its budget ends, for a body of any size. So they too are work for a thread, which
# costs them less than 0.1 ms.
SMALL_BODY = 2 * 1024
# Above it a body may take seconds.
LARGE_BODY = 256 * 1024
THREADS = 2

T = TypeVar("T")


class Parsers:
    """Runs the work of requests by the size of their bodies. ``patience`` is how many seconds one
    waits for its turn."""

    def __init__(self, patience: float) -> None:
        self._small = _Lane("parse-small", patience)
        self._medium = _Lane("parse", patience)
        self._large = _Lane("parse-large", patience)

    async def run(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Raises ``OverloadedError`` when the turn does not come in time."""
        lane = self._large if size > LARGE_BODY else self._medium
        if size <= SMALL_BODY:
            lane = self._small
        return await lane.run(client, work)

    def close(self) -> None:
        self._small.close()
        self._medium.close()
        self._large.close()


class _Lane:
    """A few threads, and those who wait for one: each client's in order, clients in turn."""

    def __init__(self, name: str, patience: float) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._patience = patience
        self._free = THREADS
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: Hashable, work: Callable[[], T]) -> T:
        await self._turn(client)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # Not when this task ends: a thread goes on with the work of a request that was cancelled.
        running.add_done_callback(lambda _: self._next())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: Hashable) -> None:
        """Returns when a thread is this request's."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._next()  # it came in the same moment
            self._forget(client, turn)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"The body waited {self._patience:g} s to be parsed; try again later."
                ) from None
            raise

    def _forget(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[client]

    def _next(self) -> None:
        """A thread is free: the next client's first request gets it."""
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
