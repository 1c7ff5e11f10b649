"""One batch, from its input file to its results."""

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
    answered,
    unanswered,
)
from .store import BatchStore
from .stored import BatchRequest, BatchStatus, RequestResult, StoredBatch

log = logger("router")

# Answers a line of this endpoint for this owner.
Answer = Callable[[str, bytes, str], Awaitable[BackgroundResponse]]

# Requests of a batch that are read at once, and that wait at once for a slot or a limit.
REQUESTS_AT_ONCE = 32
# A passing failure says nothing about the request, which is tried until the batch ends; other
# failures of nodes, such as their death, are perhaps its own.
MAX_FAILURES = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class BatchRun:
    """Validates a batch, answers its requests, and ends it. One that is broken off, as by the end
    of its router, continues with the requests that have no result."""

    def __init__(
        self,
        batch: StoredBatch,
        files: FileStore,
        batches: BatchStore,
        answer: Answer,
        slots: asyncio.Semaphore,
        longest_line: int,
    ) -> None:
        self._batch = batch
        self._files = files
        self._batches = batches
        self._answer = answer
        self._slots = slots
        self._longest_line = longest_line
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """End the batch soon, with the results that there are."""
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
                    self._batch.id, request.line, unanswered(request, reason)
                )
        await self._batches.end(self._batch.id, status)

    # ---- validation ------------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Store the lines of the input file. False if the batch failed."""
        batch = self._batch
        await self._batches.drop_requests(batch.id)
        checker = LineChecker(batch.endpoint, self._longest_line)
        try:
            file = await self._files.get(batch.input_file_id, batch.owner)
        except ApiError as error:
            if error.status != 404:
                raise
            checker.errors.append({"code": "no_file", "message": error.message, "line": None})
        else:
            async for lines in lines_of(self._files, file, self._longest_line):
                await self._batches.add_requests(batch.id, await checker.check(lines))
                if checker.full:
                    break
            checker.finish()
        if checker.errors:
            await self._batches.fail(batch.id, checker.errors)
            return False
        await self._batches.begin(batch.id, checker.total, checker.model)
        return True

    # ---- requests --------------------------------------------------------------------------

    async def _work_in_time(self) -> BatchStatus:
        """Answer the requests until all are, or the batch expires or is cancelled."""
        work = asyncio.create_task(self._work())
        cancelled = asyncio.create_task(self._cancelled.wait())
        left = self._batch.expires_at - time.time()
        try:
            await asyncio.wait((work, cancelled), timeout=left, return_when=asyncio.FIRST_COMPLETED)
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
                # Not in the task, which may be cancelled before it begins.
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
        while found := await self._batches.pending(self._batch.id, line, REQUESTS_AT_ONCE):
            for request in found:
                yield request
            line = found[-1].line

    async def _serve(self, request: BatchRequest) -> None:
        result = answered(request, await self._answer_patiently(request))
        if not await self._store_patiently(request, result):
            await self._store_patiently(request, unanswered(request, FULL))

    async def _store_patiently(self, request: BatchRequest, result: RequestResult) -> bool:
        """Enter a result. While the disk is full it is kept, since computing it again would not
        help."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                return await self._batches.add_result(self._batch.id, request.line, result)
            except ApiError as error:
                log.error("a result of batch %s is not stored: %s", self._batch.id, error.message)
            await asyncio.sleep(backoff.pause())

    async def _answer_patiently(self, request: BatchRequest) -> BackgroundResponse:
        """The answer that is not a passing failure of the cluster."""
        backoff, failures = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0
        while True:
            async with self._slots:  # not while it waits: others may go on
                answer = await self._answer(self._batch.endpoint, request.body, self._batch.owner)
            failures += not answer.passing
            failed = answer.passing or answer.status >= 500
            if not failed or failures >= MAX_FAILURES:
                return answer
            await asyncio.sleep(backoff.pause())


async def _without_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that still run. Raises the error of one that failed."""
    for task in running:
        if task.done():
            task.result()
    return {task for task in running if not task.done()}
