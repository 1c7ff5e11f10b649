"""Replies to steps that a GPU still computes when the next one is launched.

The main thread only launches: waiting for a step there would leave the device idle until the next
one. A thread of this module sleeps until the device has computed a step, and replies to the head.
On a CPU, which computes a step when it is launched, the main thread replies at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ...models.parallel import Collectives
from ..plan import VOID, StepFailure, StepResult
from .runner import LaunchedStep


class Collector:
    """Collects steps in the order in which they were launched.

    ``collect`` waits for a step's results; ``reply`` sends them, or a failure. ``failure_of``
    describes what one of them raised. ``waits``: in a thread.
    """

    def __init__(
        self,
        collect: Callable[[LaunchedStep], StepResult],
        reply: Callable[[StepResult | StepFailure, Collectives], None],
        failure_of: Callable[[int, Exception], StepFailure],
        *,
        waits: bool,
    ) -> None:
        self._collect = collect
        self._reply = reply
        self._failure_of = failure_of
        # Bounded by the head, which has at most two steps in flight.
        self._steps: queue.SimpleQueue[tuple[LaunchedStep | StepFailure, Collectives]] = (
            queue.SimpleQueue()
        )
        self._failed = False  # the last step
        self._waits = waits
        if waits:
            threading.Thread(target=self._run, name="collector", daemon=True).start()

    def put(self, step: LaunchedStep | StepFailure, collectives: Collectives) -> None:
        """Reply to a step once it is computed, or with the failure of its launch. ``collectives``
        are counted up to its launch."""
        if self._waits:
            self._steps.put((step, collectives))
        else:
            self._answer(step, collectives)

    def _run(self) -> None:
        while True:
            self._answer(*self._steps.get())

    def _answer(self, step: LaunchedStep | StepFailure, collectives: Collectives) -> None:
        """Also waits for a step whose results are void, since it writes to blocks of the cache."""
        if isinstance(step, StepFailure):
            self._reply(step, collectives)
            return
        void = self._failed and step.ahead
        self._failed = True
        failure = StepFailure(VOID, "the step before failed")
        try:
            result = self._collect(step)
            if not void:
                self._reply(result, collectives)
                self._failed = False
                return
        except Exception as error:  # of the device, or the result cannot be encoded
            failure = self._failure_of(step.step, error)
        self._reply(failure, collectives)
