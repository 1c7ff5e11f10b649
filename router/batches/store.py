"""Batches and their requests in the database."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from ..database import Database
from ..errors import ApiError
from .file_store import FileLimits, Page, find_file, list_body, new_file_id, read_page
from .rows import (
    UNFINISHED,
    BatchRequest,
    BatchStatus,
    NewBatch,
    RequestResult,
    StoredBatch,
)

DAY = 24 * 3600
# Default lifetime of results, as of uploaded files.
LIFETIME_SECONDS = 30 * DAY
# Batches that have not ended, over all keys.
MAX_UNFINISHED = 1000


_UNFINISHED = "status IN ({})".format(", ".join(f"'{status}'" for status in UNFINISHED))


class BatchStore:
    """The batches of all keys' owners. Each owner can only access its own."""

    def __init__(self, database: Database, limits: FileLimits) -> None:
        self._database = database
        self._limits = limits

    async def create(self, new: NewBatch) -> StoredBatch:
        """Create a batch, whose input is not validated yet. Raises ``ApiError`` if the input file
        does not exist, or if there are too many batches."""

        def work(connection: sqlite3.Connection) -> StoredBatch:
            file = find_file(connection, new.input_file_id, new.owner)
            if file.purpose != "batch":
                message = f"The file '{file.id}' has the purpose '{file.purpose}', not 'batch'."
                raise ApiError(400, message, param="input_file_id")
            _check_unfinished(connection)
            now = int(time.time())
            row = {
                "id": f"batch_{secrets.token_hex(12)}",
                "owner": new.owner,
                "status": BatchStatus.VALIDATING,
                "endpoint": new.endpoint,
                "input_file_id": new.input_file_id,
                "completion_window": new.completion_window,
                "metadata": json.dumps(new.metadata),
                "errors": "[]",
                "output_seconds": new.output_seconds,
                "created_at": now,
                "expires_at": now + new.seconds,
            }
            names, marks = ", ".join(row), ", ".join("?" * len(row))
            created = connection.execute(
                f"INSERT INTO batches ({names}) VALUES ({marks}) RETURNING *", tuple(row.values())
            ).fetchone()
            return StoredBatch(**created)

        return await self._database.run(work)

    async def get(self, batch_id: str, owner: str) -> StoredBatch:
        """The batch with this id. Raises ``ApiError`` 404."""
        return await self._database.run(lambda connection: _find(connection, batch_id, owner))

    async def entries(self, owner: str, page: Page) -> dict[str, Any]:
        """One page of the owner's batches, as OpenAI's list object."""

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            rows, more = read_page(connection, "batches", "owner = ?", [owner], page)
            return list_body([StoredBatch(**row).body() for row in rows], has_more=more)

        return await self._database.run(work)

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Mark a batch as cancelling. Raises ``ApiError`` 409 if it has ended."""

        def work(connection: sqlite3.Connection) -> StoredBatch:
            batch = _find(connection, batch_id, owner)
            if batch.status == BatchStatus.CANCELLING:
                return batch
            if batch.status not in UNFINISHED:
                message = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, message, code="invalid_status")
            _update(connection, batch_id, status=BatchStatus.CANCELLING, cancelling_at=_now())
            return _find(connection, batch_id, owner)

        return await self._database.run(work)

    async def unfinished(self) -> list[StoredBatch]:
        """All batches that have not ended, oldest first."""
        query = f"SELECT * FROM batches WHERE {_UNFINISHED} ORDER BY number"
        return await self._database.run(
            lambda connection: [StoredBatch(**row) for row in connection.execute(query)]
        )

    async def add_requests(self, batch_id: str, requests: Sequence[BatchRequest]) -> None:
        """Store validated requests."""

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO requests (batch, line, custom_id, body) VALUES (?, ?, ?, ?)",
                ((batch_id, each.line, each.custom_id, each.body) for each in requests),
            )

        await self._database.run(work)

    async def drop_requests(self, batch_id: str) -> None:
        """Delete the requests of a batch whose validation was interrupted."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))

        await self._database.run(work)

    async def begin(self, batch_id: str, total: int, model: str) -> None:
        """Mark a validated batch as in progress, unless it was cancelled in the meantime."""

        def work(connection: sqlite3.Connection) -> None:
            files = [_results_file(connection, batch_id, succeeded) for succeeded in (1, 0)]
            _update(
                connection,
                batch_id,
                total=total,
                model=model,
                in_progress_at=_now(),
                output_file_id=files[0],
                error_file_id=files[1],
            )
            connection.execute(
                "UPDATE batches SET status = ? WHERE id = ? AND status = ?",
                (BatchStatus.IN_PROGRESS, batch_id, BatchStatus.VALIDATING),
            )

        await self._database.run(work)

    async def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """End a batch whose input file is invalid."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))
            _update(
                connection,
                batch_id,
                status=BatchStatus.FAILED,
                errors=json.dumps(errors),
                failed_at=_now(),
            )

        await self._database.run(work)

    async def pending(self, batch_id: str, after: int, count: int) -> list[BatchRequest]:
        """The next ``count`` requests after line ``after`` that have no result."""

        def work(connection: sqlite3.Connection) -> list[BatchRequest]:
            rows = connection.execute(
                "SELECT line, custom_id, body FROM requests"
                " WHERE batch = ? AND succeeded IS NULL AND line > ? ORDER BY line LIMIT ?",
                (batch_id, after, count),
            )
            return [BatchRequest(*row) for row in rows]

        return await self._database.run(work)

    async def add_result(self, batch_id: str, line: int, result: RequestResult) -> bool:
        """Store the result of a request. False if the store is full; it is then not stored."""

        def work(connection: sqlite3.Connection) -> bool:
            (size,) = connection.execute("SELECT SUM(bytes) FROM files").fetchone()
            if result.succeeded and (size or 0) + result.size > self._limits.all_bytes:
                return False
            _add_result(connection, batch_id, line, result)
            return True

        return await self._database.run(work)

    async def end(
        self, batch_id: str, status: BatchStatus, errors: Sequence[dict[str, Any]] = ()
    ) -> None:
        """End a batch. Its results become visible files, unless they are empty."""

        def work(connection: sqlite3.Connection) -> None:
            batch = _row(connection, batch_id)
            lifetime = batch.output_seconds or LIFETIME_SECONDS
            for name, file_id in (
                ("output_file_id", batch.output_file_id),
                ("error_file_id", batch.error_file_id),
            ):
                done = connection.execute(
                    "UPDATE files SET complete = 1, created_at = ?, expires_at = ?"
                    " WHERE id = ? AND bytes > 0",
                    (_now(), _now() + lifetime, file_id),
                )
                if not done.rowcount:
                    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
                    _update(connection, batch_id, **{name: None})
            _update(connection, batch_id, status=status, **{f"{status}_at": _now()})
            if errors:
                _update(connection, batch_id, errors=json.dumps(errors))
            if batch.finalizing_at is None and status is BatchStatus.COMPLETED:
                _update(connection, batch_id, finalizing_at=_now())

        await self._database.run(work)

    async def expire(self) -> None:
        """Delete batches that ended long ago, whose files have expired."""

        def work(connection: sqlite3.Connection) -> None:
            old = f"SELECT id FROM batches WHERE expires_at < ? AND NOT {_UNFINISHED}"
            horizon = (_now() - 2 * LIFETIME_SECONDS,)
            connection.execute(f"DELETE FROM requests WHERE batch IN ({old})", horizon)
            connection.execute(f"DELETE FROM batches WHERE id IN ({old})", horizon)

        await self._database.run(work)


def _now() -> int:
    return int(time.time())


def _row(connection: sqlite3.Connection, batch_id: str) -> StoredBatch:
    return StoredBatch(
        **connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    )


def _find(connection: sqlite3.Connection, batch_id: str, owner: str) -> StoredBatch:
    row = connection.execute(
        "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
    ).fetchone()
    if row is None:
        raise ApiError(404, f"No batch found with id '{batch_id[:64]}'.", param="id")
    return StoredBatch(**row)


def _update(connection: sqlite3.Connection, batch_id: str, **values: Any) -> None:
    changes = ", ".join(f"{name} = ?" for name in values)
    connection.execute(f"UPDATE batches SET {changes} WHERE id = ?", (*values.values(), batch_id))


def _check_unfinished(connection: sqlite3.Connection) -> None:
    (count,) = connection.execute(f"SELECT COUNT(*) FROM batches WHERE {_UNFINISHED}").fetchone()
    if count >= MAX_UNFINISHED:
        message = f"{count} batches are in progress, which is the limit; try again later."
        raise ApiError(429, message, code="batch_limit")


def _results_file(connection: sqlite3.Connection, batch_id: str, succeeded: int) -> str:
    """A file whose content is results; it is invisible until its batch ends."""
    batch, file_id = _row(connection, batch_id), new_file_id()
    kind = "output" if succeeded else "error"
    connection.execute(
        "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, complete, batch,"
        " succeeded) VALUES (?, ?, 'batch_output', ?, 0, ?, 0, ?, ?)",
        (file_id, batch.owner, f"{batch_id}_{kind}.jsonl", _now(), batch_id, succeeded),
    )
    return file_id


def _add_result(
    connection: sqlite3.Connection, batch_id: str, line: int, result: RequestResult
) -> None:
    row = connection.execute(
        "UPDATE requests SET succeeded = ?, result = zeroblob(?), body = NULL"
        " WHERE batch = ? AND line = ? AND succeeded IS NULL RETURNING rowid",
        (int(result.succeeded), result.size, batch_id, line),
    ).fetchone()
    if row is None:
        return  # the batch was deleted
    # In pieces, because SQLite would copy the whole value while it holds the GIL.
    with connection.blobopen("requests", "result", row["rowid"]) as blob:
        for piece in result.pieces:
            blob.write(piece)
    connection.execute(
        "UPDATE files SET bytes = bytes + ? WHERE batch = ? AND succeeded = ?",
        (result.size, batch_id, int(result.succeeded)),
    )
    count = "completed" if result.succeeded else "failed"
    connection.execute(
        f"UPDATE batches SET {count} = {count} + 1, input_tokens = input_tokens + ?,"
        " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
        " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
        (*result.tokens, batch_id),
    )
