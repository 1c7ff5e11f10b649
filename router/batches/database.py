"""The SQLite database of files and batches, used from a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...shared.errors import StartupError
from ...shared.telemetry.logs import logger
from ..errors import SERVER, ApiError

log = logger("router")

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

# How long a transaction waits for one of another router process.
BUSY_SECONDS = 10.0
VERSION = 1
SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    complete INTEGER NOT NULL,
    batch TEXT,
    succeeded INTEGER
);
CREATE TABLE pieces (
    file TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    errors TEXT NOT NULL,
    model TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    output_seconds INTEGER,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE requests (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    body BLOB,
    succeeded INTEGER,
    result BLOB,
    PRIMARY KEY (batch, line)
);
CREATE UNIQUE INDEX custom_ids ON requests (batch, custom_id);
CREATE INDEX results ON requests (batch, succeeded, line);
"""


class Database:
    """One connection. Works run one after the other, each as a transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, or create it. Raises ``StartupError``."""
        try:
            await self._in_thread(self._open)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--batch-dir {self._path.parent}: {error}") from error

    async def run(self, work: Work[Result]) -> Result:
        """Run ``work`` as a transaction. Raises ``ApiError`` 503 if the disk fails or is full."""
        try:
            return await self._in_thread(lambda: self._transaction(work))
        except sqlite3.Error as error:
            log.error("%s: %s: free some space if its disk is full", self._path, error)
            message = "The storage of files and batches failed; its disk may be full."
            raise ApiError(503, message, kind=SERVER, code="storage_failed") from error

    async def close(self) -> None:
        """Close the connection once the work in progress is done."""
        if self._connection is not None:
            await self._in_thread(self._connection.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._connection = connection = sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._path.chmod(0o600)
        connection.row_factory = sqlite3.Row
        for setting in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL"):
            connection.execute(f"PRAGMA {setting}")
        self._transaction(_create)

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


def _create(connection: sqlite3.Connection) -> None:
    """Create the tables of a new file. Raises ``sqlite3.Error`` for a file of another version."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found not in (0, VERSION):
        raise sqlite3.DatabaseError(
            f"the database is of version {found}, and this router writes version {VERSION}; use "
            "another folder"
        )
    if found == 0:
        for statement in SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
