"""A thread that waits for what a GPU does in one stream, so that no other thread polls for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# What was waited for is over, or has failed.
Then = Callable[[Exception | None], None]


class DeviceWaits:
    """Waits in the order of a stream. The thread sleeps in the GPU's driver, without the GIL; it
    starts with the first wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: queue.SimpleQueue[tuple[Callable[[], None], Then] | None] = queue.SimpleQueue()
        self._started = False

    def put(self, wait: Callable[[], None], then: Then) -> None:
        """Call ``then`` on the thread after ``wait``. From one thread only."""
        self._waits.put((wait, then))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the thread after what was put."""
        self._waits.put(None)

    def _run(self) -> None:
        while (item := self._waits.get()) is not None:
            wait, then = item
            failure = None
            try:
                wait()
            except Exception as error:  # torch and drivers raise errors of many types
                failure = error
            then(failure)
