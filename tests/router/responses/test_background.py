"""Responses in the background: polling and cancelling."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.router.responses import background_runs
from tandem.router.responses.store import LOST_SECONDS
from tandem.tests.router.openai.test_tools import TEMPLATE
from tandem.tests.router.responses.test_responses import ended, served, store_with
from tandem.tests.router.responses.test_tool_grammars import PATCH, PATCHED, TEXT
from tandem.tests.router.support import make_model, until


async def test_a_response_in_the_background_is_polled(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        polled = asyncio.Event()

        async def talk(request: Any, context: Any) -> Any:
            await polled.wait()
            async for event in c.node._talk(request, context):
                yield event

        c.node.script = talk
        response = await client.responses.create(input="hi", background=True)
        assert response.status == "queued" and response.output == []
        await until(lambda: c.node.requests != [])
        now = await client.responses.retrieve(response.id)
        assert now.status in ("queued", "in_progress") and now.background
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            await client.responses.create(input="x", previous_response_id=response.id)
        polled.set()
        await until(lambda: c.router.app.services.runs.find(response.id, "") is None)
        ended = await client.responses.retrieve(response.id)
        assert (ended.status, ended.output_text) == ("completed", "hello world")
        assert ended.usage.output_tokens > 0
        assert await client.responses.cancel(response.id) == ended
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            await client.responses.retrieve(response.id, stream=True)
        usage = (await c.client.get("/v1/usage")).json()
        assert str(ended.usage.output_tokens) in str(usage)


async def test_calls_of_a_response_in_the_background(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path, context=2048) as (c, client):
        c.node.reply = c.encode("[" + PATCHED)
        choice: Any = {"type": "custom", "name": "patch"}
        response = await client.responses.create(
            input="hi", tools=[PATCH], tool_choice=choice, background=True
        )
        await until(lambda: c.router.app.services.runs.find(response.id, "") is None)
        assert (await client.responses.retrieve(response.id)).output[0].input == TEXT


async def test_it_can_be_cancelled(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        c.node.delay = 60.0
        response = await client.responses.create(input="hi", background=True)
        await until(lambda: c.node.active == 1)
        cancelled = await client.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        await until(lambda: c.node.active == 0)
        assert await client.responses.retrieve(response.id) == cancelled
        await until(lambda: c.router.app.handler.active == 0)


async def test_other_routers_of_a_host_read_and_cancel_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_runs, "REPORT_SECONDS", 0.02)
    folder = str(tmp_path / "shared")
    async with (
        served(tmp_path, batch_dir=folder) as (c, one),
        served(tmp_path, batch_dir=folder) as (_, other),
    ):
        c.node.delay = 60.0
        response, deleted = [await one.responses.create(input="hi", background=True) for _ in "ab"]
        await until(lambda: c.node.active == 2)
        while (await other.responses.retrieve(response.id)).status == "queued":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            await other.responses.create(input="x", previous_response_id=response.id)
        cancelled = await other.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        assert await one.responses.retrieve(response.id) == cancelled
        await other.responses.delete(deleted.id)
        await until(lambda: c.node.active == 0)
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(deleted.id)


async def test_a_background_response_of_a_dead_router_has_failed() -> None:
    now = [0.0]
    async with store_with(2, now, lifetime=1000.0) as store:
        body = {"id": "a", "status": "queued", "output": []}
        await store.add(ended("a", body=body, in_progress=True))
        now[0] = LOST_SECONDS - 1
        assert (await store.get("a", "")).in_progress
        assert await store.report_progress({"a": "in_progress"}) == []
        now[0] *= 2
        assert (await store.get("a", "")).body["status"] == "in_progress"
        now[0] += 2
        lost = await store.get("a", "")
        assert not lost.in_progress and lost.body["status"] == "failed"
        assert "has ended" in lost.body["error"]["message"]


async def test_a_late_report_does_not_revive_a_response_that_has_ended() -> None:
    now = [0.0]
    async with store_with(2, now, lifetime=1000.0) as store:
        body = {"id": "a", "status": "queued", "output": []}
        await store.add(ended("a", body=body, in_progress=True))
        await store.add(ended("a", body=body | {"status": "cancelled"}))
        await store.report_progress({"a": "in_progress"})
        stored = await store.get("a", "")
        assert not stored.in_progress and stored.body["status"] == "cancelled"


async def test_a_failed_background_response_has_an_error(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        await c.node.stop()
        response = await client.responses.create(input="hi", background=True)
        await until(lambda: c.router.app.services.runs.find(response.id, "") is None)
        failed = await client.responses.retrieve(response.id)
        assert failed.status == "failed" and failed.error.message
        await client.responses.delete(response.id)


async def test_deleting_one_in_progress_ends_it_and_others_are_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        c.node.delay = 60.0
        response = await client.responses.create(input="hi", background=True)
        await until(lambda: c.node.active == 1)
        await client.responses.delete(response.id)
        await until(lambda: c.node.active == 0)
        c.node.delay = 0.01
        last = await client.responses.create(input="hi", background=True)
        await c.router._http.stop()
        stored = await c.router.app.services.responses.get(last.id, "")
        assert stored.body["status"] == "completed"
