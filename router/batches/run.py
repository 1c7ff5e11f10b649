"""Run one batch, from its input file to its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from ...shared.process.backoff import Backoff
from ...shared.telemetry.logs import logger
from ..errors import ApiError
from .file_store import FileStore
from .input_lines import LineChecker, lines_of
from .result_line import (
    CANCELLED,
    EXPIRED,
    FULL,
    BackgroundResponse,
    error_result,
    response_result,
)
from .rows import BatchRequest, BatchStatus, RequestResult, StoredBatch
from .store import BatchStore

log = logger("router")

# Serves a request: its endpoint, line and owner.
Serve = Callable[[str, bytes, str], Awaitable[BackgroundResponse]]

# Requests of a batch to read at once, and to have in progress or waiting for a slot.
REQUESTS_AT_ONCE = 32
# Attempts at a request. Transient failures do not count: they are retried until the batch ends.
# Others, such as a crashed node, may be the request's fault.
MAX_FAILURES = 3
MIN_PAUSE, MAX_PAUSE = 0.5, 30.0


class BatchRun:
    """Validates a batch, serves its requests, and ends it. If the run was interrupted, a new one
    continues with the requests that have no result."""

    def __init__(
        self,
        batch: StoredBatch,
        files: FileStore,
        batches: BatchStore,
        serve: Serve,
        slots: asyncio.Semaphore,
        max_line_bytes: int,
    ) -> None:
        self._batch = batch
        self._files = files
        self._batches = batches
        self._serve_line = serve
        self._slots = slots
        self._max_line_bytes = max_line_bytes
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """End the batch soon, with its results so far."""
        self._cancelled.set()

    async def run(self) -> None:
        """Run to the end. Raises ``ApiError`` if the storage fails."""
        if self._batch.in_progress_at is None and not await self._validate():
            return
        status = await self._work_in_time()
        if status is not BatchStatus.COMPLETED:
            reason = EXPIRED if status is BatchStatus.EXPIRED else CANCELLED
            async for request in self._pending():
                await self._batches.add_result(
                    self._batch.id, request.line, error_result(request, reason)
                )
        await self._batches.end(self._batch.id, status)

    async def _validate(self) -> bool:
        """Check and store the requests of the input file. False if the batch failed."""
        batch = self._batch
        await self._batches.drop_requests(batch.id)
        checker = LineChecker(batch.endpoint, self._max_line_bytes)
        try:
            file = await self._files.get(batch.input_file_id, batch.owner)
        except ApiError as error:
            if error.status != 404:
                raise
            checker.errors.append({"code": "no_file", "message": error.message, "line": None})
        else:
            async for lines in lines_of(self._files, file, self._max_line_bytes):
                await self._batches.add_requests(batch.id, await checker.check(lines))
                if checker.full:
                    break
            checker.finish()
        if checker.errors:
            await self._batches.fail(batch.id, checker.errors)
            return False
        await self._batches.begin(batch.id, checker.total, checker.model)
        return True

    async def _work_in_time(self) -> BatchStatus:
        """Serve all requests, unless the batch expires or is cancelled first."""
        work = asyncio.create_task(self._work())
        cancelled = asyncio.create_task(self._cancelled.wait())
        remaining = self._batch.expires_at - time.time()
        try:
            await asyncio.wait(
                (work, cancelled), timeout=remaining, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                work.result()
                return BatchStatus.COMPLETED
            return BatchStatus.CANCELLED if self._cancelled.is_set() else BatchStatus.EXPIRED
        finally:
            for task in (work, cancelled):
                task.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _work(self) -> None:
        running: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(REQUESTS_AT_ONCE)
        try:
            async for request in self._pending():
                await room.acquire()
                task = asyncio.create_task(self._serve(request))
                # Not in the task itself, which may be cancelled before it starts.
                task.add_done_callback(lambda _: room.release())
                running.add(task)
                running = await _without_done(running)
            for task in running:
                await task
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _pending(self) -> AsyncIterator[BatchRequest]:
        """The requests without a result, in the order of their lines."""
        line = 0
        while requests := await self._batches.pending(self._batch.id, line, REQUESTS_AT_ONCE):
            for request in requests:
                yield request
            line = requests[-1].line

    async def _serve(self, request: BatchRequest) -> None:
        result = response_result(request, await self._response(request))
        if not await self._store(request, result):
            await self._store(request, error_result(request, FULL))

    async def _store(self, request: BatchRequest, result: RequestResult) -> bool:
        """Store a result. Retries while the disk is full. False if the store is over its limit."""
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            try:
                return await self._batches.add_result(self._batch.id, request.line, result)
            except ApiError as error:
                log.error("a result of batch %s is not stored: %s", self._batch.id, error.message)
            await asyncio.sleep(backoff.pause())

    async def _response(self, request: BatchRequest) -> BackgroundResponse:
        """The response to a request. Retries after failures of the cluster."""
        backoff, failures = Backoff(MIN_PAUSE, MAX_PAUSE), 0
        batch = self._batch
        while True:
            async with self._slots:  # not during the pause, so that other requests can run
                response = await self._serve_line(batch.endpoint, request.body, batch.owner)
            failures += not response.transient
            failed = response.transient or response.status >= 500
            if not failed or failures >= MAX_FAILURES:
                return response
            await asyncio.sleep(backoff.pause())


async def _without_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that are not done. Raises the error of a failed one."""
    for task in running:
        if task.done():
            task.result()
    return {task for task in running if not task.done()}
