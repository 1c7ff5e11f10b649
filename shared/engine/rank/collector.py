"""Replies to steps that a GPU still computes when the next one is launched.

The main thread only launches: waiting for a step there would leave the device idle until the next
one. A thread of this module sleeps until the device has computed a step, and replies to the head.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ...models.parallel import Collectives
from ..plan import VOID, StepFailure, StepResult
from .runner import LaunchedStep

log = logging.getLogger("tandem.rank")


class Collector:
    """Collects steps in the order in which they were launched.

    ``collect`` waits for a step's results; ``reply`` sends them, or a failure. ``failure_of``
    describes what ``collect`` raised.
    """

    def __init__(
        self,
        collect: Callable[[LaunchedStep], StepResult],
        reply: Callable[[StepResult | StepFailure, Collectives], None],
        failure_of: Callable[[int, Exception], StepFailure],
    ) -> None:
        self._collect = collect
        self._reply = reply
        self._failure_of = failure_of
        # Bounded by the head, which has at most two steps in flight.
        self._steps: queue.SimpleQueue[tuple[LaunchedStep | StepFailure, Collectives]] = (
            queue.SimpleQueue()
        )
        self._failed = False  # the last step
        threading.Thread(target=self._run, name="collector", daemon=True).start()

    def put(self, step: LaunchedStep | StepFailure, collectives: Collectives) -> None:
        """Reply to a step once it is computed, or with the failure of its launch. ``collectives``
        are counted up to its launch."""
        self._steps.put((step, collectives))

    def _run(self) -> None:
        while True:
            step, collectives = self._steps.get()
            outcome = step if isinstance(step, StepFailure) else self._outcome(step)
            self._reply(outcome, collectives)

    def _outcome(self, step: LaunchedStep) -> StepResult | StepFailure:
        """Also waits for a step whose results are void, since it writes to blocks of the cache."""
        void = self._failed and step.ahead
        self._failed = True
        try:
            result = self._collect(step)
        except Exception as error:
            return self._failure_of(step.result.step, error)
        if void:
            return StepFailure(VOID, "the step before failed")
        self._failed = False
        return result
