"""Uploaded files, and the results of batches as files, in the database."""

from __future__ import annotations

import secrets
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from ..database import Database
from ..errors import ApiError, invalid

# Time limit of an upload.
UPLOAD_SECONDS = 3600
# Content that is stored in one row, or read at once.
PIECE_BYTES = 1 << 20
# More than SQLite can store in a value.
MAX_RESULT_BYTES = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits of the store, over all keys."""

    file_bytes: int
    files: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """An entry of the store. If ``batch`` is set, its content is the batch's successful results
    (``succeeded`` 1), or the failed ones (0)."""

    number: int
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None
    complete: int
    batch: str | None
    succeeded: int | None

    def body(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list: ``limit`` entries after the one with the id ``after``."""

    after: str | None = None
    limit: int = 20
    newest_first: bool = True


def list_body(entries: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }


class FileStore:
    """The files of all keys' owners. Each owner can only access its own."""

    def __init__(self, database: Database, limits: FileLimits) -> None:
        self._database = database
        self.limits = limits

    async def begin(self) -> str:
        """Create a file without content, which is invisible until ``finish``. Raises ``ApiError``
        if the store is full."""
        file_id = new_file_id()

        def work(connection: sqlite3.Connection) -> None:
            check_room(connection, self.limits)
            connection.execute(
                "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, complete)"
                " VALUES (?, '', '', '', 0, ?, 0)",
                (file_id, int(time.time())),
            )

        await self._database.run(work)
        return file_id

    async def append(self, file_id: str, number: int, data: bytes) -> None:
        """Store the next piece of a file. Raises ``ApiError`` 413 if the file gets too large."""

        def work(connection: sqlite3.Connection) -> None:
            (size,) = connection.execute(
                "UPDATE files SET bytes = bytes + ? WHERE id = ? RETURNING bytes",
                (len(data), file_id),
            ).fetchone()
            if size > self.limits.file_bytes:
                limit = self.limits.file_bytes
                raise ApiError(413, f"The file is over the limit of {limit} bytes.", param="file")
            connection.execute("INSERT INTO pieces VALUES (?, ?, ?)", (file_id, number, data))

        await self._database.run(work)

    async def finish(
        self, file_id: str, *, owner: str, purpose: str, filename: str, expires_at: int
    ) -> StoredFile:
        """Complete a file whose content is stored, and make it visible."""

        def work(connection: sqlite3.Connection) -> StoredFile:
            row = connection.execute(
                "UPDATE files SET owner = ?, purpose = ?, filename = ?, expires_at = ?,"
                " complete = 1 WHERE id = ? RETURNING *",
                (owner, purpose, filename, expires_at, file_id),
            ).fetchone()
            return StoredFile(**row)

        return await self._database.run(work)

    async def discard(self, file_id: str) -> None:
        """Delete a file whose upload failed."""
        await self._database.run(lambda connection: delete_file(connection, file_id))

    async def get(self, file_id: str, owner: str) -> StoredFile:
        """The file with this id. Raises ``ApiError`` 404."""
        return await self._database.run(lambda connection: find_file(connection, file_id, owner))

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete a file and its content. Raises ``ApiError`` 404."""

        def work(connection: sqlite3.Connection) -> None:
            find_file(connection, file_id, owner)
            delete_file(connection, file_id)

        await self._database.run(work)

    async def entries(self, owner: str, purpose: str | None, page: Page) -> dict[str, Any]:
        """One page of the owner's files, as OpenAI's list object."""

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            condition = "owner = ? AND complete = 1 AND COALESCE(expires_at > ?, 1)"
            values: list[str | float] = [owner, time.time()]
            if purpose is not None:
                condition, values = condition + " AND purpose = ?", [*values, purpose]
            rows, more = read_page(connection, "files", condition, values, page)
            return list_body([StoredFile(**row).body() for row in rows], has_more=more)

        return await self._database.run(work)

    async def read(self, file: StoredFile, position: int) -> tuple[bytes, int] | None:
        """The next content of a file, and the next position; ``None`` at its end. The first
        ``position`` is 0."""
        read = _read_piece if file.batch is None else _read_results
        return await self._database.run(lambda connection: read(connection, file, position))

    async def expire(self) -> None:
        """Delete expired files, and incomplete files of uploads that their router did not end."""

        def work(connection: sqlite3.Connection) -> None:
            now = int(time.time())
            rows = connection.execute(
                "SELECT id FROM files WHERE expires_at <= ?"
                " OR (complete = 0 AND batch IS NULL AND created_at < ?)",
                (now, now - UPLOAD_SECONDS),
            ).fetchall()
            for row in rows:
                delete_file(connection, row["id"])
            connection.execute("PRAGMA incremental_vacuum(256)")

        await self._database.run(work)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def check_room(connection: sqlite3.Connection, limits: FileLimits) -> None:
    """Raise ``ApiError`` if the store is full."""
    count, size = connection.execute(
        "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files"
    ).fetchone()
    if count >= limits.files or size >= limits.all_bytes:
        raise _full(count, size, limits)


def find_file(connection: sqlite3.Connection, file_id: str, owner: str) -> StoredFile:
    """A complete file that has not expired. Raises ``ApiError`` 404."""
    row = connection.execute(
        "SELECT * FROM files WHERE id = ? AND owner = ? AND complete = 1", (file_id, owner)
    ).fetchone()
    if row is None or (row["expires_at"] or time.time() + 1) <= time.time():
        raise ApiError(404, f"No such File object: {file_id[:64]}", param="id")
    return StoredFile(**row)


def delete_file(connection: sqlite3.Connection, file_id: str) -> None:
    """Delete a file and its content, or the results that are its content."""
    row = connection.execute(
        "DELETE FROM files WHERE id = ? RETURNING batch, succeeded", (file_id,)
    ).fetchone()
    connection.execute("DELETE FROM pieces WHERE file = ?", (file_id,))
    if row is not None and row["batch"] is not None:
        connection.execute(
            "DELETE FROM requests WHERE batch = ? AND succeeded = ?",
            (row["batch"], row["succeeded"]),
        )


def read_page(
    connection: sqlite3.Connection, table: str, condition: str, values: list[Any], page: Page
) -> tuple[list[sqlite3.Row], bool]:
    """Rows of a table by time of creation, and whether more follow. Raises ``RequestError`` for an
    unknown ``after``."""
    order, sign = ("DESC", "<") if page.newest_first else ("ASC", ">")
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE {condition} AND id = ?", (*values, page.after)
        ).fetchone()
        if row is None:
            raise invalid(f"Invalid 'after': nothing here has the id '{page.after[:64]}'.", "after")
        condition, values = f"{condition} AND number {sign} ?", [*values, row["number"]]
    rows = connection.execute(
        f"SELECT * FROM {table} WHERE {condition} ORDER BY number {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def _read_piece(
    connection: sqlite3.Connection, file: StoredFile, position: int
) -> tuple[bytes, int] | None:
    row = connection.execute(
        "SELECT data FROM pieces WHERE file = ? AND number = ?", (file.id, position)
    ).fetchone()
    return None if row is None else (row["data"], position + 1)


def _read_results(
    connection: sqlite3.Connection, file: StoredFile, position: int
) -> tuple[bytes, int] | None:
    """``position`` is a line number, and an offset in that line's result, which may be large."""
    line, start = divmod(position, MAX_RESULT_BYTES)
    rows = connection.execute(
        "SELECT rowid, line FROM requests WHERE batch = ? AND succeeded = ? AND line >= ?"
        " ORDER BY line",
        (file.batch, file.succeeded, line),
    )
    content = bytearray()
    for row in rows:
        with connection.blobopen("requests", "result", row["rowid"], readonly=True) as blob:
            blob.seek(start)
            content += blob.read(PIECE_BYTES)
            ended = blob.tell() == len(blob)
            line, start = (row["line"] + 1, 0) if ended else (row["line"], blob.tell())
        if len(content) >= PIECE_BYTES:
            break
    return (bytes(content), line * MAX_RESULT_BYTES + start) if content else None


def _full(count: int, size: int, limits: FileLimits) -> ApiError:
    if count >= limits.files:
        amount = f"{count} files, which is its limit (--max-files)"
    else:
        amount = f"{size} bytes, which is over its limit of {limits.all_bytes} (--max-stored-bytes)"
    message = f"This server stores {amount}; delete files, or try again after some have expired."
    return ApiError(403, message, code="storage_full")
