"""Responses that are computed while no client waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

from ..access.key_usage import KeyUsage
from ..errors import ApiError
from ..http.access_log import AccessRecord
from .response_events import ResponseEvents


class BackgroundRun:
    """One response while it is computed. ``access`` is its line in the access log."""

    def __init__(self, runs: BackgroundRuns, owner: str, path: str) -> None:
        self.owner = owner
        self.access = AccessRecord("BACKGROUND", path, status=200)
        self._runs = runs
        self._events: ResponseEvents
        self._task: asyncio.Task[None] | None = None

    def formatted_by(self, events: ResponseEvents) -> None:
        """Begin, with the formatter of the response."""
        self._events = events
        self._runs.add(self.id, self)

    @property
    def id(self) -> str:
        return self._events.id

    def begun(self, task: asyncio.Task[None]) -> None:
        """Remember the task, for ``cancel``."""
        self._task = task

    @property
    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._events.so_far()

    async def cancel(self) -> None:
        """End the response, unless it has just ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def ended(self) -> None:
        """Forget the run; the response is stored by now."""
        self._runs.remove(self)


class BackgroundRuns:
    """The responses in progress, at most as many as requests may be."""

    def __init__(self, usage: KeyUsage) -> None:
        self._usage = usage
        self._runs: dict[str, BackgroundRun] = {}

    def add(self, response_id: str, run: BackgroundRun) -> None:
        self._runs[response_id] = run

    def find(self, response_id: str, owner: str) -> BackgroundRun | None:
        """The run of a response that is in progress."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def check_ended(self, response_id: str, owner: str, param: str) -> None:
        """Raise ``ApiError`` for a response that cannot be continued yet."""
        if self.find(response_id, owner) is not None:
            message = f"The response '{response_id[:64]}' is still in progress; wait for its end."
            raise ApiError(400, message, param=param, code="response_in_progress")

    def remove(self, run: BackgroundRun) -> None:
        self._usage.count_tokens(run.access)
        self._runs.pop(run.id, None)
