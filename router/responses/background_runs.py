"""Responses that are computed while no client waits for them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from ...shared.telemetry.logs import logger
from ..access.key_usage import KeyUsage
from ..errors import ApiError, internal_error, to_api_error
from ..handler import DetachedRequest, GenerateHandler
from ..http.access_log import AccessRecord
from ..http.exchange import HttpExchange
from ..http.memory_budget import MemoryShare
from ..options import RouterOptions
from ..surface import Surface
from .response_events import ResponseEvents

log = logger("router")


class BackgroundRun:
    """One response while it is computed by a ``task``. ``access`` is its line in the access log."""

    task: asyncio.Task[None]

    def __init__(self, events: ResponseEvents, owner: str, access: AccessRecord) -> None:
        self.events = events
        self.owner = owner
        self.access = access

    @property
    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        return self.events.so_far()

    async def cancel(self) -> None:
        """End the response, unless it has just ended."""
        self.task.cancel()
        await asyncio.wait((self.task,))


class BackgroundRuns:
    """The responses in progress, within the same limits as all other requests."""

    def __init__(self, handler: GenerateHandler, usage: KeyUsage, options: RouterOptions) -> None:
        self._handler = handler
        self._usage = usage
        self._options = options
        self._runs: dict[str, BackgroundRun] = {}

    async def start(
        self,
        exchange: HttpExchange,
        surface: Surface,
        events: ResponseEvents,
        owner: str,
        deadline: float,
    ) -> BackgroundRun:
        """Begin to compute the response that ``events`` formats. Raises as for a request whose
        client waits."""
        access = AccessRecord("BACKGROUND", surface.path, status=200, key=exchange.access.key)
        client = DetachedRequest(exchange.owner, access, exchange.headers)
        async with AsyncExitStack() as entered:
            entered.enter_context(self._handler.slot())
            memory = await entered.enter_async_context(self._handler.room(client, events.request))
            room = entered.pop_all()
        run = self._runs[events.request.request_id] = BackgroundRun(events, owner, access)
        run.task = self._handler.spawn(self._compute(run, surface, room, memory, deadline))
        return run

    async def _compute(
        self,
        run: BackgroundRun,
        surface: Surface,
        room: AsyncExitStack,
        memory: MemoryShare,
        deadline: float,
    ) -> None:
        events, access, request = run.events, run.access, run.events.request
        async with room:
            try:
                await self._handler.answer(surface, request, events, access, memory, deadline)
            except asyncio.CancelledError:
                events.abandoned(None)
                await events.keep()
            except Exception as error:
                failure = self._failure(error)
                access.error = failure.code or failure.kind
                self._handler.metrics.count_error(failure.status)
                events.abandoned(failure)
                await events.keep()
            finally:
                self._usage.count_tokens(access)
                del self._runs[request.request_id]
                if self._options.access_log:
                    access.log()

    def _failure(self, error: Exception) -> ApiError:
        failure = to_api_error(error, retry_after=self._options.retry_after)
        if failure is None:
            log.error("a request in the background failed", exc_info=error)
            failure = internal_error()
        return failure

    def find(self, response_id: str, owner: str) -> BackgroundRun | None:
        """The run of a response that is in progress."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def check_ended(self, response_id: str, owner: str, param: str) -> None:
        """Raise ``ApiError`` for a response that cannot be continued yet."""
        if self.find(response_id, owner) is not None:
            message = f"The response '{response_id[:64]}' is still in progress; wait for its end."
            raise ApiError(400, message, param=param, code="response_in_progress")
