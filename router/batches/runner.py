"""Run all batches of a folder, in one router at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...shared.config.batches import OFF
from ...shared.errors import OverloadedError, StartupError
from ...shared.process.backoff import Backoff
from ...shared.telemetry.logs import logger
from ..database import Database
from ..errors import ApiError
from ..options import RouterOptions
from .file_store import FileLimits, FileStore
from .rows import BatchStatus, StoredBatch
from .run import MAX_PAUSE, BatchRun, Serve
from .store import BatchStore
from .tables import SCHEMA

log = logger("router")

# Interval of looking for batches from other routers, and first pause after a storage failure.
POLL_SECONDS = 1.0
# Interval of deleting expired files and batches.
EXPIRE_SECONDS = 60.0
MAX_UPLOADS = 8
# A batch ends after this many unexpected errors.
MAX_BUGS = 5
# A line is parsed in one piece.
MAX_LINE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """``path`` is ``None`` if files and batches are off, for the reason ``why_off``. A router fails
    to start if a ``required`` folder is unusable, but not if a default one is."""

    path: Path | None
    required: bool = False
    why_off: str = ""


def batch_folder(options: RouterOptions) -> BatchFolder:
    """The folder of ``--batch-dir``, or a default one among the user's state files.

    The name of the default one contains the port, so that a router finds its batches again and
    routers on one host do not share them, and the host name, because home directories may be on a
    network file system, which SQLite does not support for several hosts.
    """
    folder = options.batch_dir
    if folder == OFF:
        return BatchFolder(None, why_off="--batch-dir is off")
    if folder is not None:
        return BatchFolder(Path(folder), required=True)
    if options.port == 0:
        return BatchFolder(None, why_off="at a port chosen at random they would not be found again")
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        return BatchFolder(None, why_off="this user has no home")
    return BatchFolder(Path(state, "tandem", "batches", f"{socket.gethostname()}-{options.port}"))


@dataclass(slots=True)
class _Trouble:
    """The failures of a batch's runs in this process."""

    bugs: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(POLL_SECONDS, MAX_PAUSE))


class Batches:
    """The stores of one folder and the runs of its batches.

    Several routers may share the folder: each serves the routes, and the one that holds the lock
    runs the batches.
    """

    def __init__(self, folder: Path, options: RouterOptions, serve: Serve) -> None:
        self._folder = folder
        self._serve = serve
        self._max_line_bytes = min(options.max_body_bytes, MAX_LINE_BYTES)
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
        self._wakeup = asyncio.Event()
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
        """A slot for one upload. Raises ``OverloadedError`` if all are taken."""
        if self._uploads >= MAX_UPLOADS:
            message = f"{self._uploads} files are being uploaded, which is the limit"
            raise OverloadedError(f"{message}; try again later.")
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    def wake(self) -> None:
        """Look for new and cancelled batches at once."""
        self._wakeup.set()

    async def run(self) -> None:
        """Run batches until cancelled. Unfinished batches continue in the next run."""
        due = 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wakeup.clear()
                if self._try_lock():
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
        """Close the database and the lock. Call after ``run`` has ended."""
        await self._database.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _poll(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._wakeup.wait()
        except TimeoutError:
            pass

    async def _update_runs(self) -> None:
        """Start new batches, and cancel those that clients have cancelled."""
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
            self._serve,
            self._slots,
            self._max_line_bytes,
        )
        task = asyncio.create_task(self._run(run, batch.id))
        self._runs[batch.id] = run, task

    async def _run(self, run: BatchRun, batch_id: str) -> None:
        try:
            await run.run()
            log.info("batch %s ended", batch_id)
            self._troubles.pop(batch_id, None)
        except ApiError as error:  # the storage failed; this is not the batch's fault
            log.error("batch %s pauses: %s", batch_id, error.message)
            await asyncio.sleep(self._trouble(batch_id).backoff.pause())
        except Exception as error:
            log.exception("batch %s pauses", batch_id)
            await self._note_bug(batch_id, error)
        finally:
            self._runs.pop(batch_id, None)
            self._wakeup.set()

    async def _note_bug(self, batch_id: str, error: Exception) -> None:
        """Pause before the batch's next run, or end it if it has failed too often."""
        trouble = self._trouble(batch_id)
        trouble.bugs += 1
        if trouble.bugs < MAX_BUGS:
            await asyncio.sleep(trouble.backoff.pause())
            return
        message = f"The server failed {trouble.bugs} times on this batch: {type(error).__name__}."
        reason = {"code": "server_error", "message": message, "line": None}
        try:
            await self.batches.end(batch_id, BatchStatus.FAILED, [reason])
        except ApiError as failure:
            log.error("batch %s could not be ended: %s", batch_id, failure.message)
            await asyncio.sleep(trouble.backoff.pause())
            return
        log.error("batch %s ended: %s", batch_id, message)
        del self._troubles[batch_id]

    def _trouble(self, batch_id: str) -> _Trouble:
        return self._troubles.setdefault(batch_id, _Trouble())

    async def _expire(self) -> None:
        await self.files.expire()
        await self.batches.expire()

    def _try_lock(self) -> bool:
        """Take the lock, if this router does not hold it. False if another router does."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
