"""Threads for parsing, rendering and tokenizing, which would block the event loop.

A body waits only for bodies of its own size class: two clients whose bodies take seconds do not
delay small ones. Within a class, clients take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...shared.errors import OverloadedError

# A body up to this size takes a few milliseconds, unless the model's chat template loops: its time
# budget is 0.2 s for a body of any size. So small bodies go to a thread too, which costs less than
# 0.1 ms. A larger body may take seconds.
SMALL_BODY = 256 * 1024
THREADS = 2

T = TypeVar("T")


class ParserPools:
    """A pool of threads for each size class. ``patience`` is how many seconds a request waits for
    its turn."""

    def __init__(self, patience: float) -> None:
        self._small = _FairPool("parse-small", patience)
        self._large = _FairPool("parse-large", patience)

    async def run(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. Raises ``OverloadedError`` if its turn does not come in
        time."""
        pool = self._small if size <= SMALL_BODY else self._large
        return await pool.run(client, work)

    def close(self) -> None:
        self._small.close()
        self._large.close()


class _FairPool:
    """A few threads, and a queue for each client; clients take turns."""

    def __init__(self, name: str, patience: float) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._patience = patience
        self._free = THREADS
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: Hashable, work: Callable[[], T]) -> T:
        await self._turn(client)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # Not when this task ends: the thread continues the work of a cancelled request.
        running.add_done_callback(lambda _: self._next())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: Hashable) -> None:
        """Wait for a free thread."""
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
                self._next()  # the turn came at the same moment
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
        """Give a thread that became free to the next client's first request."""
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind all other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
