"""All batches of a folder, run by one router at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...shared.errors import OverloadedError, StartupError
from ...shared.process.backoff import Backoff
from ...shared.telemetry.logs import logger
from ..database import Database
from ..errors import ApiError
from ..options import RouterOptions
from .file_store import FileLimits, FileStore
from .run import LONGEST_PAUSE, Answer, BatchRun
from .store import BatchStore
from .stored import BatchStatus, StoredBatch
from .tables import SCHEMA

log = logger("router")

# How often batches of other routers are looked for, and how soon a failed storage is tried again.
POLL_SECONDS = 1.0
# How often what has expired is deleted.
EXPIRE_SECONDS = 60.0
MAX_UPLOADS = 8
# Unknown errors of a batch's runs, after which it ends.
MAX_BUGS = 5
# A line holds one request, which is parsed at once.
MAX_LINE_BYTES = 32 << 20


@dataclass(slots=True)
class _Trouble:
    """The failures of a batch's runs in this process."""

    bugs: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(POLL_SECONDS, LONGEST_PAUSE))


class Batches:
    """The stores of one folder and the runs of its batches.

    Several routers may share the folder: each serves files and batches, and the one that holds the
    lock runs them.
    """

    def __init__(self, folder: Path, options: RouterOptions, answer: Answer) -> None:
        self._folder = folder
        self._answer = answer
        self._longest_line = min(options.max_body_bytes, MAX_LINE_BYTES)
        limits = FileLimits(
            file_bytes=options.max_file_bytes,
            files=options.max_files,
            all_bytes=options.max_stored_bytes,
        )
        self._database = Database(SCHEMA)
        self.files = FileStore(self._database, limits)
        self.batches = BatchStore(self._database, limits)
        self._slots = asyncio.Semaphore(options.batch_concurrency)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._troubles: dict[str, _Trouble] = {}  # of unfinished batches
        self._changed = asyncio.Event()
        self._lock: int | None = None
        self._uploads = 0

    async def open(self) -> None:
        """Open the folder, or create it. Raises ``StartupError``."""
        await self._database.open(self._folder / "batches.sqlite3")
        try:
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartupError(f"--batch-dir {self._folder}: {error.strerror}") from error

    @contextmanager
    def upload(self) -> Iterator[None]:
        """The place of one upload. Raises ``OverloadedError``."""
        if self._uploads >= MAX_UPLOADS:
            message = f"{self._uploads} files are being uploaded, which is the limit"
            raise OverloadedError(f"{message}; try again later.")
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    def changed(self) -> None:
        """Look for new and cancelled batches at once."""
        self._changed.set()

    async def run(self) -> None:
        """Run batches until cancelled; those in progress continue when a router starts again."""
        due = 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                if self._locked():
                    try:
                        await self._update_runs()
                        if loop.time() >= due:
                            await self._expire()
                            due = loop.time() + EXPIRE_SECONDS
                    except ApiError as error:
                        log.error("batches pause: %s", error.message)
                await self._poll()
        finally:
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the files, after ``run`` has ended."""
        await self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _update_runs(self) -> None:
        """Start what is new, and cancel what clients have cancelled."""
        for batch in await self.batches.unfinished():
            if batch.id not in self._runs:
                self._start(batch)
            if batch.status == BatchStatus.CANCELLING:
                self._runs[batch.id][0].cancel()

    def _start(self, batch: StoredBatch) -> None:
        run = BatchRun(
            batch,
            self.files,
            self.batches,
            self._answer,
            self._slots,
            self._longest_line,
        )
        task = asyncio.create_task(self._run(run, batch.id))
        self._runs[batch.id] = run, task

    async def _run(self, run: BatchRun, batch_id: str) -> None:
        try:
            await run.run()
            log.info("batch %s ended", batch_id)
            self._troubles.pop(batch_id, None)
        except ApiError as error:  # the storage fails, which is not the batch's fault
            log.error("batch %s pauses: %s", batch_id, error.message)
            await asyncio.sleep(self._trouble(batch_id).backoff.pause())
        except Exception as error:
            log.exception("batch %s pauses", batch_id)
            await self._note_bug(batch_id, error)
        finally:
            self._runs.pop(batch_id, None)
            self._changed.set()

    async def _note_bug(self, batch_id: str, error: Exception) -> None:
        """Try a batch again later; one that has failed too often ends with its results so far."""
        trouble = self._trouble(batch_id)
        trouble.bugs += 1
        if trouble.bugs < MAX_BUGS:
            await asyncio.sleep(trouble.backoff.pause())
            return
        message = f"The server failed {trouble.bugs} times at this batch: {type(error).__name__}."
        reason = {"code": "server_error", "message": message, "line": None}
        try:
            await self.batches.end(batch_id, BatchStatus.FAILED, [reason])
        except ApiError as failure:
            log.error("batch %s does not end: %s", batch_id, failure.message)
            await asyncio.sleep(trouble.backoff.pause())
            return
        log.error("batch %s ended: %s", batch_id, message)
        del self._troubles[batch_id]

    def _trouble(self, batch_id: str) -> _Trouble:
        return self._troubles.setdefault(batch_id, _Trouble())

    async def _expire(self) -> None:
        await self.files.expire()
        await self.batches.expire()

    def _locked(self) -> bool:
        """True if this router runs the batches of the folder."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
