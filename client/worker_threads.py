"""Daemon threads for requests, which do not delay the end of the process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class WorkerThreads:
    """At most ``count`` threads. Unlike those of ``ThreadPoolExecutor`` they are daemons: an
    interrupted process must not wait for the responses to its requests."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def submit(self, work: Work) -> None:
        """Run ``work``, which must not raise, in a thread."""
        self._work.put(work)
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._run, daemon=True, name="request").start()

    def stop(self) -> None:
        """Discard work that has not started; the threads end after their current work."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.get_nowait()
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
