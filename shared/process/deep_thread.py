"""A thread with a large stack, for native code that recurses as deep as its input nests."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

# Address space; memory is used only as far as the recursion goes.
STACK_BYTES = 512 << 20
_STACK_SIZE_LOCK = threading.Lock()


class DeepThread:
    """Runs work in order. The thread starts on demand, and is a daemon, so that an exiting process
    does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False
        # Bounded by the callers, which wait for their work.
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], _Finish]] = queue.SimpleQueue()

    def run(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run ``work`` after all earlier work, unless the future is cancelled first."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def finish_soon(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(finish, result, error)

        def work_unless_cancelled() -> Any:
            return None if done.cancelled() else work()

        self._work.put((work_unless_cancelled, finish_soon))
        if not self._started:
            self._started = True
            _start(self._name, self._serve)
        return done

    def _serve(self) -> None:
        while True:
            work, finish = self._work.get()
            try:
                result = work()
            except BaseException as error:
                finish(None, error)
            else:
                finish(result, None)


_Finish = Callable[[Any, BaseException | None], None]


def _start(name: str, target: Callable[[], None]) -> None:
    with _STACK_SIZE_LOCK:  # the size applies to every thread that the process starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        finally:
            threading.stack_size(usual)
