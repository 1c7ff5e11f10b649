"""Files and batches, with OpenAI's client and without."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.router.batches import runner
from tandem.router.batches.run import BatchRun
from tandem.router.batches.runner import batch_folder
from tandem.router.batches.store import BatchStore
from tandem.router.errors import ApiError
from tandem.router.options import RouterOptions
from tandem.shared.config.limits import BACKGROUND_PRIORITY
from tandem.shared.errors import StartupError
from tandem.tests.router.batches.batch_client import (
    CHAT,
    EMBEDDINGS,
    HI,
    RESPONSES,
    create,
    ended,
    jsonl,
    line,
    parsed,
    served,
)
from tandem.tests.router.support import Cluster, cluster, longest_hold, until


async def test_a_file_can_be_stored_read_listed_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        content = bytes(range(256)) * 9000  # more than two pieces
        uploads = [
            await client.files.create(file=(f"{name}.jsonl", content), purpose="batch")
            for name in "abc"
        ]
        assert (uploads[0].bytes, uploads[0].filename) == (len(content), "a.jsonl")
        assert (uploads[0].purpose, uploads[0].status) == ("batch", "processed")
        assert (await client.files.content(uploads[1].id)).content == content
        assert await client.files.retrieve(uploads[1].id) == uploads[1]
        page = await client.files.list(limit=2)
        assert [file.id for file in page.data] == [uploads[2].id, uploads[1].id] and page.has_more
        everything = [file.id async for file in client.files.list(limit=2, order="asc")]
        assert everything == [file.id for file in uploads]
        assert (await client.files.delete(uploads[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(uploads[0].id)
        short = await client.files.create(
            file=("d", b""), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
        assert short.expires_at == pytest.approx(short.created_at + 3600, abs=2)
        assert (await client.files.content(short.id)).content == b""


async def test_a_batch_completes_and_separates_its_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    async with served(tmp_path) as (c, client):
        lines = [line(1), line(2, n=2), line(3, model="other"), line(4, stream=True)]
        batch = await create(client, jsonl(*lines), metadata={"a": "b"})
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert batch.status == "completed"
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        results = parsed((await client.files.content(batch.output_file_id)).text)
        assert [one["custom_id"] for one in results] == ["r1", "r2"]
        first = results[0]["response"]
        assert first["status_code"] == 200 and results[0]["error"] is None
        assert first["body"]["choices"][0]["message"]["content"]
        assert len(results[1]["response"]["body"]["choices"]) == 2
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["response"]["status_code"] for one in wrong] == [404, 400]
        token_counts = [one["response"]["body"]["usage"]["total_tokens"] for one in results]
        assert batch.usage.total_tokens == sum(token_counts)
        assert {request.priority for request in c.node.requests} == {BACKGROUND_PRIORITY}
        assert [one.id async for one in client.batches.list()] == [batch.id]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)
        logged = [vars(each)["fields"] for each in caplog.records if each.name == "tandem.access"]
        mine = [fields for fields in logged if fields["path"] == CHAT]
        assert sorted(fields["status"] for fields in mine) == [200, 200, 400, 404]
        assert sum("error" in fields for fields in mine) == 2
        page = c.router.metrics.render().decode()
        assert 'tandem_request_errors_total{status="404"} 1.0' in page


async def test_a_batch_of_responses_which_are_not_stored(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        first = await client.responses.create(input="one")
        bodies: list[dict[str, Any]] = [
            {"input": "hi", "previous_response_id": first.id},
            {"input": "hi", "store": True},
            {"input": "hi", "background": True},
            {"input": [{"type": "item_reference", "id": "x"}]},
        ]
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": RESPONSES, "body": body}
            for i, body in enumerate(bodies)
        ]
        batch = await ended(client, await create(client, jsonl(*lines), endpoint=RESPONSES))
        [result] = parsed((await client.files.content(batch.output_file_id)).text)
        body = result["response"]["body"]
        assert body["status"] == "completed" and not body["store"]
        assert first.usage and body["usage"]["input_tokens"] > first.usage.input_tokens
        assert batch.usage.total_tokens == body["usage"]["total_tokens"]
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["response"]["status_code"] for one in wrong] == [400, 400, 404]
        params = [one["response"]["body"]["error"]["param"] for one in wrong]
        assert params == ["store", "background", "input"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(body["id"])


async def test_a_batch_of_embeddings(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        request_line = {
            "custom_id": "e",
            "method": "POST",
            "url": EMBEDDINGS,
            "body": {"input": "hi"},
        }
        batch = await ended(client, await create(client, jsonl(request_line), endpoint=EMBEDDINGS))
        [result] = parsed((await client.files.content(batch.output_file_id)).text)
        assert len(result["response"]["body"]["data"][0]["embedding"]) == 8
        assert batch.error_file_id is None


async def test_an_invalid_file_fails_with_the_lines(tmp_path: Path) -> None:
    async with served(tmp_path, max_body_bytes=2000) as (c, client):
        content = jsonl(line(1), line(1), line(2, user="x" * 100_000), line(3))
        batch = await ended(client, await create(client, content + b"{]\n\n"))
        assert batch.status == "failed" and batch.output_file_id is None
        assert [(error.code, error.line) for error in batch.errors.data] == [
            ("duplicate_custom_id", 2),
            ("line_too_long", 3),
            ("invalid_json_line", 5),
        ]
        assert "2000 bytes" in batch.errors.data[1].message
        batch = await ended(client, await create(client, b"\n"))
        assert [error.code for error in batch.errors.data] == ["empty_file"]
        assert not c.node.requests


async def test_a_restarted_router_continues_a_batch(tmp_path: Path) -> None:
    count = 12
    async with served(tmp_path, batch_concurrency=2) as (c, client):

        async def first_ones(request: Any, context: Any) -> AsyncIterator[Any]:
            if len(c.node.requests) > 5:
                await asyncio.Event().wait()
            async for event in c.node._talk(request, context):
                yield event

        c.node.script = first_ones
        batch = await create(client, jsonl(*(line(n) for n in range(count))))
        await until(lambda: len(c.node.requests) > 5)  # of two at once, so more than 3 have ended
    async with served(tmp_path) as (c, client):
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.request_counts.completed == count
        assert 0 < len(c.node.requests) <= count - 3
        results = parsed((await client.files.content(batch.output_file_id)).text)
        assert [one["custom_id"] for one in results] == [f"r{n}" for n in range(count)]


@pytest.mark.parametrize("way", ["cancelled", "expired"])
async def test_a_batch_ends_early_with_the_results_that_there_are(tmp_path: Path, way: str) -> None:
    async with served(tmp_path, batch_concurrency=1) as (c, client):
        window, completed = ("24h", 1) if way == "cancelled" else ("1s", 0)

        async def first_only(request: Any, context: Any) -> AsyncIterator[Any]:
            if len(c.node.requests) > completed:
                await asyncio.Event().wait()
            async for event in c.node._talk(request, context):
                yield event

        c.node.script = first_only
        content = jsonl(line(1), line(2), line(3))
        batch = await create(client, content, completion_window=window)
        if way == "cancelled":
            await until(lambda: len(c.node.requests) == 2)
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == way and getattr(batch, f"{way}_at")
        counts = batch.request_counts
        assert (counts.completed, counts.failed) == (completed, 3 - completed)
        wrong = parsed((await client.files.content(batch.error_file_id)).text)
        assert [one["error"]["code"] for one in wrong] == [f"batch_{way}"] * (3 - completed)
        await until(lambda: c.node.active == 0)


async def test_a_request_waits_for_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.batches.run.MIN_PAUSE", 0.02)
    async with served(tmp_path) as (c, client):
        node = c.nodes.pop()
        await node.stop()
        batch = await create(client, jsonl(line(1)))
        await until(lambda: c.router.app.services.batches is not None)
        await c.add("decode-1")
        assert (await ended(client, batch)).request_counts.completed == 1


async def test_what_belongs_to_another_key_does_not_exist(tmp_path: Path) -> None:
    async with served(tmp_path, api_key="one,two") as (c, client):
        batch = await ended(client, await create(client, jsonl(line(1))))
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="two") as other:
            for work in (
                other.batches.retrieve(batch.id),
                other.batches.cancel(batch.id),
                other.files.retrieve(batch.output_file_id),
                other.files.content(batch.input_file_id),
                other.files.delete(batch.input_file_id),
                other.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await work
            assert not (await other.files.list()).data and not (await other.batches.list()).data


async def test_invalid_uploads_and_bodies_are_rejected(tmp_path: Path) -> None:
    async with served(tmp_path, max_file_bytes=2048, max_files=2) as (c, client):
        for name, content, fields, status in (
            ("../x", b"a", {"purpose": "batch"}, 400),
            ("x\\y", b"a", {"purpose": "batch"}, 400),
            ("x", b"a", {"purpose": "vision"}, 400),
            ("x", b"a", {}, 400),
            ("x", b"a" * 3000, {"purpose": "batch"}, 413),
            ("x", b"a" * 300_000, {"purpose": "batch"}, 413),
        ):
            response = await c.client.post(
                "/v1/files", files={"file": (name, content)}, data=fields
            )
            assert response.status_code == status, (name, response.text)
        assert (await c.client.post("/v1/files", json={})).status_code == 415
        body = {"input_file_id": 5, "endpoint": CHAT, "completion_window": "24h"}
        assert (await c.client.post("/v1/batches", json=body)).status_code == 400
        for query in ("limit=0", "limit=x", "order=up", "after=none"):
            assert (await c.client.get(f"/v1/files?{query}")).status_code == 400
        assert not (await client.files.list()).data
        for _ in range(2):
            await client.files.create(file=("a", b"a"), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="max-files"):
            await client.files.create(file=("a", b"a"), purpose="batch")


async def test_requests_of_a_batch_count_against_the_limits_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for their key, and meanwhile hold up no other."""
    monkeypatch.setattr("tandem.router.batches.run.MIN_PAUSE", 0.01)
    keys = tmp_path / "keys"
    keys.write_text("alice: one rpm=4\nbob: two")
    async with served(tmp_path, api_key_file=str(keys), batch_concurrency=1) as (c, _):
        clients = [
            openai.AsyncOpenAI(base_url=c.url + "/v1", api_key=key) for key in ("one", "two")
        ]
        alice, bob = clients
        limited = await create(alice, jsonl(*(line(n) for n in range(6))))
        usage = c.router.app.services.usage
        counts = {name: usage.of(name) for name in ("alice", "bob")}
        await until(lambda: len(c.node.requests) == 4 and counts["alice"].limited["requests"] > 0)
        assert (await ended(bob, await create(bob, jsonl(line(9))))).request_counts.completed == 1
        assert counts["bob"].completion_tokens > 0
        assert len(c.node.requests) == 5
        refused = await c.client.post(CHAT, json=HI, headers={"authorization": "Bearer one"})
        assert refused.status_code == 429
        stopped = await ended(alice, await alice.batches.cancel(limited.id))
        assert (stopped.request_counts.completed, stopped.request_counts.failed) == (4, 2)
        for client in clients:
            await client.close()


async def test_a_batch_that_meets_a_bug_again_and_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: BatchRun) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(BatchRun, "run", fail)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    async with served(tmp_path) as (_, client):
        batch = await ended(client, await create(client, jsonl(line(1))))
    assert batch.status == "failed" and batch.failed_at
    [error] = batch.errors.data
    assert error.code == "server_error" and "ZeroDivisionError" in error.message


async def test_results_wait_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.batches.run.MIN_PAUSE", 0.01)
    add_result, failures = BatchStore.add_result, 0

    async def full_at_first(self: BatchStore, *args: Any) -> bool:
        nonlocal failures
        failures += 1
        if failures < 4:
            raise ApiError(503, "The disk is full.")
        return await add_result(self, *args)

    monkeypatch.setattr(BatchStore, "add_result", full_at_first)
    async with served(tmp_path) as (c, client):
        batch = await ended(client, await create(client, jsonl(line(1), line(2))))
        assert batch.request_counts.completed == 2
        assert len(c.node.requests) == 2, "nothing is computed again"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def off(c: Cluster) -> str:
    """The error message of routes when files and batches are off."""
    for path in ("/v1/files", "/v1/batches", "/v1/files/x/content"):
        response: httpx.Response = await c.client.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_enabled"
    return str(response.json()["error"]["message"])


async def test_they_are_off_where_they_would_not_be_found_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        assert "at a port chosen at random they would not be found again" in await off(c)
    async with cluster(tmp_path, batch_dir="off") as c:
        assert "off: --batch-dir is off. Start the router with --batch-dir FOLDER" in await off(c)


async def test_a_router_keeps_them_among_the_users_state_files_by_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    async with (
        cluster(tmp_path, port=port),
        openai.AsyncOpenAI(base_url=url, api_key="x") as client,
    ):
        batch = await ended(client, await create(client, jsonl(line(1))))
        assert batch.request_counts.completed == 1
    folder = tmp_path / "state" / "tandem" / "batches" / f"{socket.gethostname()}-{port}"
    assert (folder / "batches.sqlite3").exists() and folder.stat().st_mode & 0o777 == 0o700


async def test_only_a_configured_data_folder_has_to_be_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with cluster(tmp_path, port=free_port()) as c:
        assert "Not a directory" in await off(c)
    assert len([r for r in caplog.records if "files and batches are off" in r.message]) == 1
    with pytest.raises(StartupError, match=r"--batch-dir .*Not a directory"):
        async with cluster(tmp_path, batch_dir=str(tmp_path / "state" / "own")):
            pass


@pytest.mark.parametrize(
    ("environment", "options", "path", "why_off"),
    [
        ({"XDG_STATE_HOME": "/s"}, {"port": 9}, "/s/tandem/batches/HOST-9", ""),
        ({"HOME": "/h"}, {"port": 9}, "/h/.local/state/tandem/batches/HOST-9", ""),
        ({"XDG_STATE_HOME": "s"}, {"port": 9}, None, "this user has no home"),
        ({"HOME": "/h"}, {"port": 0}, None, "at a port chosen at random"),
        ({"HOME": "/h"}, {"port": 0, "batch_dir": "b"}, "b", ""),
        ({"HOME": "/h"}, {"port": 9, "batch_dir": "off"}, None, "--batch-dir is off"),
    ],
)
def test_the_folder_follows_from_the_options_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    options: dict[str, Any],
    path: str | None,
    why_off: str,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "HOST")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = batch_folder(RouterOptions(**options))
    assert (folder.path and str(folder.path)) == path and folder.why_off.startswith(why_off)


@pytest.mark.parametrize(
    ("content", "code", "count"),
    [(b"{bad\n" * 100_000, "invalid_json_line", 100), (b"\n" * (1 << 20), "empty_file", 1)],
    ids=["bad lines", "blank lines"],
)
async def test_a_hostile_file_does_not_hold_the_loop(
    tmp_path: Path, content: bytes, code: str, count: int
) -> None:
    async with served(tmp_path) as (_, client):
        async with longest_hold() as hold:
            batch = await ended(client, await create(client, content))
        assert batch.status == "failed" and len(batch.errors.data) == count
        assert {error.code for error in batch.errors.data} == {code}
        # The client's part of the work is this process's too.
        assert hold.seconds < 0.1
