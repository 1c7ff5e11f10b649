"""The bounds of files and batches, each met with its own error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.router.batches import runner, store
from tandem.router.batches.file_store import FileLimits, FileStore
from tandem.router.batches.rows import RequestResult
from tandem.router.batches.store import BatchStore
from tandem.router.batches.tables import SCHEMA
from tandem.router.batches.upload import MAX_FILENAME
from tandem.router.database import Database
from tandem.router.errors import ApiError
from tandem.tests.router.batches.batch_client import CHAT, create, jsonl, line, served

PURPOSE = {"purpose": "batch"}


async def test_names_of_files_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, _):
        for length, status in ((MAX_FILENAME, 200), (MAX_FILENAME + 1, 400)):
            file = {"file": ("x" * length, b"a")}
            response = await c.client.post("/v1/files", files=file, data=PURPOSE)
            assert response.status_code == status, length


async def test_batches_and_uploads_at_once_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, nodes=0) as (c, client):
        monkeypatch.setattr(store, "MAX_UNFINISHED", 1)
        first = await create(client, jsonl(line(1)))
        fields = {"endpoint": CHAT, "completion_window": "24h"}
        body = fields | {"input_file_id": first.input_file_id}
        response = await c.client.post("/v1/batches", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "batch_limit")
        monkeypatch.setattr(runner, "MAX_UPLOADS", 0)
        response = await c.client.post("/v1/files", files={"file": ("a", b"a")}, data=PURPOSE)
        assert response.status_code == 503 and "0 files are being uploaded" in response.text
        monkeypatch.undo()
        await client.batches.cancel(first.id)
        assert (await c.client.post("/v1/batches", json=body)).status_code == 200


async def test_results_over_the_size_of_the_store_are_not_entered(tmp_path: Path) -> None:
    database = Database(SCHEMA)
    await database.open(tmp_path / "batches.sqlite3")
    try:
        batches = BatchStore(database, FileLimits(file_bytes=100, files=9, all_bytes=100))
        large = RequestResult(succeeded=True, pieces=(b"x" * 101,))
        assert not await batches.add_result("b", 1, large)
    finally:
        await database.close()


async def test_a_full_disk_stores_no_part_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(SCHEMA)
    await database.open(tmp_path / "batches.sqlite3")
    files = FileStore(database, FileLimits(file_bytes=1 << 20, files=9, all_bytes=1 << 20))
    uploading = await files.begin()

    async def pages(limit: int) -> None:
        await database.run(lambda connection: connection.execute(f"PRAGMA max_page_count={limit}"))

    await pages(1)  # rounded up to those that are used
    with pytest.raises(ApiError) as caught:
        await files.append(uploading, 0, bytes(100_000))
    assert (caught.value.status, caught.value.code) == (503, "storage_failed")
    [message] = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "batches.sqlite3") in message and "disk is full: free some" in message
    await pages(1 << 20)
    await files.append(uploading, 0, bytes(1000))
    file = await files.finish(
        uploading, owner="", purpose="batch", filename="f", expires_at=1 << 40
    )
    assert file.bytes == 1000
    await database.close()
