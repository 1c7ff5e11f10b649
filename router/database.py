"""A SQLite database of the routers of one host, used from a thread of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..shared.errors import StartupError
from ..shared.telemetry.logs import logger
from .errors import SERVER, ApiError

log = logger("router")

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

# How long a transaction waits for another router process to finish its own.
BUSY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Schema:
    """The statements that create the tables of a new database. A file with another ``version`` is
    rejected."""

    version: int
    statements: str


class Database:
    """One connection to a database file, or to a database in memory. Functions run one after the
    other, each as a transaction."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._path: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._connection: sqlite3.Connection | None = None

    async def open(self, path: Path) -> None:
        """Open the file at ``path``, or create it. Raises ``StartupError``."""
        self._path = path
        try:
            await self._in_thread(lambda: self._open(path))
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--batch-dir {path.parent}: {error}") from error

    async def open_in_memory(self) -> None:
        """Create a database in memory, which is lost when the process ends."""
        self._path = None
        await self._in_thread(lambda: self._connect(":memory:"))

    async def run(self, work: Work[Result]) -> Result:
        """Run ``work`` as a transaction. Raises ``ApiError`` 503 if the disk fails or is full."""
        try:
            return await self._in_thread(lambda: self._transaction(work))
        except sqlite3.Error as error:
            raise self._to_api_error(error) from error

    def run_and_wait(self, work: Work[Result]) -> Result:
        """Blocking ``run``, for threads other than the event loop's."""
        try:
            return self._thread.submit(self._transaction, work).result()
        except sqlite3.Error as error:
            raise self._to_api_error(error) from error

    def _to_api_error(self, error: sqlite3.Error) -> ApiError:
        where = self._path or "the database in memory"
        log.error("%s: %s: free some space if its disk is full", where, error)
        message = "The router's storage failed; its disk may be full."
        return ApiError(503, message, kind=SERVER, code="storage_failed")

    async def close(self) -> None:
        """Close the connection once the work in progress is done. Idempotent."""
        if self._connection is not None:
            await self._in_thread(self._connection.close)
            self._connection = None
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            # SQLite fails if two processes set the journal mode of one file at the same time.
            fcntl.flock(folder, fcntl.LOCK_EX)
            self._connect(path)
        finally:
            os.close(folder)
        path.chmod(0o600)

    def _connect(self, path: Path | str) -> None:
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._connection = connection
        connection.row_factory = sqlite3.Row
        for setting in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL"):
            connection.execute(f"PRAGMA {setting}")
        self._transaction(self._create)

    def _create(self, connection: sqlite3.Connection) -> None:
        """Create the tables of a new file. Raises ``sqlite3.Error`` if it has another version."""
        (file_version,) = connection.execute("PRAGMA user_version").fetchone()
        version = self._schema.version
        if file_version not in (0, version):
            raise sqlite3.DatabaseError(
                f"the database has version {file_version}, but this router needs version "
                f"{version}; use another folder"
            )
        if file_version == 0:
            for statement in self._schema.statements.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")

    def _transaction(self, work: Work[Result]) -> Result:
        assert self._connection is not None
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result
