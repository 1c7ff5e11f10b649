"""Large files: results are stored and read in pieces, and input lines are split from pieces."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.router.batches import file_store, input_lines
from tandem.router.batches.file_store import FileLimits, FileStore, StoredFile
from tandem.router.batches.input_lines import lines_of
from tandem.router.batches.rows import RequestResult
from tandem.router.batches.store import BatchStore
from tandem.router.batches.tables import SCHEMA
from tandem.router.database import Database

FILE = StoredFile(
    number=1, id="f", owner="", purpose="batch_output", filename="f", bytes=0, created_at=0,
    expires_at=None, complete=1, batch="b", succeeded=1,
)  # fmt: skip


@asynccontextmanager
async def stores(tmp_path: Path) -> AsyncIterator[tuple[BatchStore, FileStore]]:
    database = Database(SCHEMA)
    await database.open(tmp_path / "batches.sqlite3")
    limits = FileLimits(file_bytes=1 << 30, files=100, all_bytes=1 << 30)
    try:
        yield BatchStore(database, limits), FileStore(database, limits)
    finally:
        await database.close()


async def test_a_large_result_is_stored_and_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "PIECE_BYTES", 1000)
    lines = [(b"a",), (b"b" * 600,), tuple(b"%d" % (i % 10) * 300 for i in range(20)), (b"c\n",)]
    async with stores(tmp_path) as (batches, files):

        def enter(connection: sqlite3.Connection) -> None:
            for line in range(len(lines) + 1):
                row = ("b", line, str(line))
                connection.execute(
                    "INSERT INTO requests (batch, line, custom_id) VALUES (?,?,?)", row
                )

        await batches._database.run(enter)
        for line, pieces in enumerate(lines):
            result = RequestResult(succeeded=True, pieces=pieces)
            assert await batches.add_result("b", line, result)
        read, position = [], 0
        while (chunk := await files.read(FILE, position)) is not None:
            data, position = chunk
            read.append(data)
    assert b"".join(read) == b"".join(piece for pieces in lines for piece in pieces)
    assert len(read) > 5 and max(map(len, read)) < 2000


class Pieces:
    """A file store with one file, in these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def read(self, file: Any, position: int) -> tuple[bytes, int] | None:
        if position == len(self._pieces):
            return None
        return self._pieces[position], position + 1


async def lines(*pieces: bytes, longest: int = 10) -> list[tuple[int, bytes]]:
    files: Any = Pieces(*pieces)
    return [line async for some in lines_of(files, FILE, longest) for line in some]


async def test_lines_are_cut_out_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await lines() == [] == await lines(b"\n \n", b"\n")
    cut = [(1, b"abcd"), (3, b"ef"), (4, b"g")]
    assert await lines(b"ab", b"cd\n\ne", b"f\ng") == cut
    # The end of a line that is too long is dropped as it arrives.
    long = [(1, b"x" * 11), (2, b"y" * 11)]
    assert await lines(*[b"x" * 7] * 9, b"\n" + b"y" * 30) == long
    monkeypatch.setattr(input_lines, "MAX_BLANK_BYTES", 3)
    assert await lines(b"  \n    \n") == [(2, b"    ")]
