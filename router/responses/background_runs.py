"""Responses that are computed while no client waits for them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

from ..access.key_usage import KeyUsage
from ..errors import ApiError, failure_of
from ..handler import DetachedRequest, GenerateHandler
from ..http.access_log import AccessRecord
from ..http.exchange import HttpExchange
from ..http.memory_budget import MemoryShare
from ..options import RouterOptions
from ..surface import Surface
from .formatter import ResponsesFormatter
from .store import ResponseStore
from .surface import Responses

TELL_SECONDS = 1.0
# How often the end of a response that another router computes is looked for.
POLL_SECONDS = 0.1


class BackgroundRun:
    """One response while it is computed by a ``task``. ``access`` is its line in the access log."""

    task: asyncio.Task[None]

    def __init__(self, events: ResponsesFormatter, owner: str, access: AccessRecord) -> None:
        self.events = events
        self.owner = owner
        self.access = access

    @property
    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        return self.events.so_far()


class BackgroundRuns:
    """The responses that this router computes, within the same limits as all other requests. Those
    of other routers are in the ``store``, where they are cancelled."""

    def __init__(
        self,
        store: ResponseStore,
        handler: GenerateHandler,
        usage: KeyUsage,
        options: RouterOptions,
    ) -> None:
        self._store = store
        self._handler = handler
        self._usage = usage
        self._options = options
        self._runs: dict[str, BackgroundRun] = {}

    async def start(
        self,
        exchange: HttpExchange,
        surface: Responses,
        events: ResponsesFormatter,
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
            begun = surface.stored(events.request, events.so_far(), in_progress=True)
            await self._store.add(begun)
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
                await self._handler.whole(surface, request, events, access, memory, deadline)
            except asyncio.CancelledError:
                events.abandoned(None)
                await asyncio.shield(events.keep())  # it may be cancelled twice
            except Exception as error:
                what, wait = "a request in the background", self._options.retry_after
                failure = failure_of(error, what, retry_after=wait)
                access.error = failure.code or failure.kind
                self._handler.metrics.count_error(failure.status)
                events.abandoned(failure)
                await asyncio.shield(events.keep())
            finally:
                self._usage.count_tokens(access)
                del self._runs[request.request_id]
                if self._options.access_log:
                    access.log()

    def find(self, response_id: str, owner: str) -> BackgroundRun | None:
        """The run of a response that is in progress."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    async def cancel(self, response_id: str, owner: str) -> None:
        """End a response in progress at any router. Raises ``ApiError`` 404."""
        run = self.find(response_id, owner)
        if run is not None:
            run.task.cancel()
            await asyncio.wait((run.task,))
        elif (await self._store.get(response_id, owner)).in_progress:
            await self._store.cancel(response_id, owner)
            while (await self._store.get(response_id, owner)).in_progress:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    async def watch(self) -> None:
        """Tell other routers what is in progress here, and end what was cancelled there, until
        cancelled itself."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            if not self._runs:
                continue
            statuses = {name: run.events.begun_status for name, run in self._runs.items()}
            with suppress(ApiError):  # it has been logged, and is tried again
                for response_id in await self._store.tell(statuses):
                    if (run := self._runs.get(response_id)) is not None:
                        run.task.cancel()
