"""Lifetimes of files and batches, limits on storage, and batches that end early."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tandem.router.batches import file_store, store, upload
from tandem.router.batches.runner import Batches
from tandem.tests.router.batches.batch_client import create, ended, jsonl, line, parsed, served
from tandem.tests.router.support import Cluster
from tandem.tests.support.clock import SteppedClock

HOUR = 3600
EXPIRY: Any = {"anchor": "created_at", "seconds": HOUR}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    """The clock of the stores."""
    clock = SteppedClock()
    for module in (store, file_store, upload):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=clock))
    return clock


def folder_of(c: Cluster) -> Batches:
    assert c.router.app.services.batches is not None
    return c.router.app.services.batches


def rows(tmp_path: Path, table: str) -> int:
    """Rows of a table in the database."""
    connection = sqlite3.connect(tmp_path / "batches" / "batches.sqlite3")
    try:
        (count,) = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
    finally:
        connection.close()
    return int(count)


async def test_a_file_that_has_expired_is_gone(tmp_path: Path, clock: SteppedClock) -> None:
    async with served(tmp_path) as (c, client):
        lasting = await client.files.create(file=("a", b"a"), purpose="batch")
        short = await client.files.create(file=("b", b"b"), purpose="batch", expires_after=EXPIRY)
        clock.now += HOUR - 1
        assert [file.id for file in (await client.files.list()).data] == [short.id, lasting.id]
        clock.now += 1
        assert [file.id for file in (await client.files.list()).data] == [lasting.id]
        for work in (
            client.files.retrieve(short.id),
            client.files.content(short.id),
            client.files.delete(short.id),
            client.batches.create(
                input_file_id=short.id, endpoint="/v1/embeddings", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        assert rows(tmp_path, "pieces") == 2
        await folder_of(c).files.expire()
        assert (rows(tmp_path, "files"), rows(tmp_path, "pieces")) == (1, 1)
        clock.now += store.LIFETIME_SECONDS
        await folder_of(c).files.expire()
        assert rows(tmp_path, "files") == 0


async def test_an_upload_that_was_broken_off_leaves_nothing(
    tmp_path: Path, clock: SteppedClock
) -> None:
    async with served(tmp_path) as (c, _):
        files = folder_of(c).files
        await files.append(await files.begin(), 0, b"a")
        await files.expire()
        assert rows(tmp_path, "pieces") == 1
        clock.now += file_store.UPLOAD_SECONDS + 1
        await files.expire()
        assert (rows(tmp_path, "files"), rows(tmp_path, "pieces")) == (0, 0)


async def test_results_expire_when_requested_and_batches_later(
    tmp_path: Path, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.batches.run.time", SimpleNamespace(time=clock))
    async with served(tmp_path) as (c, client):
        content = jsonl(line(1), line(2, model="other"))
        batch = await ended(client, await create(client, content, output_expires_after=EXPIRY))
        for file_id in (batch.output_file_id, batch.error_file_id):
            file = await client.files.retrieve(file_id)
            assert (file.created_at, file.expires_at) == (clock.now, clock.now + HOUR)
        clock.now += HOUR
        await folder_of(c).files.expire()
        with pytest.raises(openai.NotFoundError):
            await client.files.content(batch.output_file_id)
        assert rows(tmp_path, "requests") == 0
        await folder_of(c).batches.expire()
        assert (await client.batches.retrieve(batch.id)).status == "completed"
        clock.now += 3 * store.LIFETIME_SECONDS
        await folder_of(c).batches.expire()
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch.id)


@contextmanager
def held_by_another_router(tmp_path: Path) -> Iterator[None]:
    """Batches do not run, since another router holds the lock of their folder."""
    folder = tmp_path / "batches"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def test_a_batch_that_is_cancelled_before_its_file_is_read_sends_nothing(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        with held_by_another_router(tmp_path):
            c, client = await stack.enter_async_context(served(tmp_path))
            batch = await create(client, jsonl(line(1), line(2)))
            for _ in range(2):
                assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled" and batch.output_file_id is None
        assert (batch.request_counts.total, batch.request_counts.failed) == (2, 2)
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["error"]["code"] for one in wrong] == ["batch_cancelled"] * 2
        assert not c.node.requests


async def test_a_batch_whose_window_ended_while_no_router_ran_expires(tmp_path: Path) -> None:
    with held_by_another_router(tmp_path):
        async with served(tmp_path) as (_, client):
            batch = await create(client, jsonl(line(1), line(2)))
    connection = sqlite3.connect(tmp_path / "batches" / "batches.sqlite3")
    with connection:
        connection.execute("UPDATE batches SET expires_at = created_at - 1")
    connection.close()
    async with served(tmp_path) as (c, client):
        batch = await ended(client, batch)
        assert batch.status == "expired" and batch.request_counts.failed == 2
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["error"]["code"] for one in wrong] == ["batch_expired"] * 2
        assert not c.node.requests


async def test_a_batch_whose_file_is_deleted_before_it_is_read_fails(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with held_by_another_router(tmp_path):
            _, client = await stack.enter_async_context(served(tmp_path))
            batch = await create(client, jsonl(line(1)))
            await client.files.delete(batch.input_file_id)
        batch = await ended(client, batch)
        assert batch.status == "failed" and batch.failed_at
        assert [error.code for error in batch.errors.data] == ["no_file"]


async def test_responses_without_room_are_errors_of_their_requests(tmp_path: Path) -> None:
    content = jsonl(line(1), line(2), line(3))
    room = len(content) + 1000  # one response takes more than half of it
    async with served(tmp_path, max_stored_bytes=room) as (_, client):
        batch = await ended(client, await create(client, content))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["error"]["code"] for one in wrong] == ["storage_full"] * 2
        assert all(one["response"] is None for one in wrong)
        with pytest.raises(openai.PermissionDeniedError, match="max-stored-bytes"):
            await create(client, content)
