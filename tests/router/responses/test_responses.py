"""POST /v1/responses and what is kept of it, with OpenAI's client."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.router.database import Database
from tandem.router.errors import ApiError
from tandem.router.responses import store as store_module
from tandem.router.responses.store import ResponseStore, StoredResponse
from tandem.router.state import SCHEMA
from tandem.tests.router.in_process_responses import InProcessResponses, openai_client
from tandem.tests.router.support import Cluster, cluster


@asynccontextmanager
async def served(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Cluster, Any]]:
    async with cluster(tmp_path, **options) as c:
        key = options.get("api_key", "x").split(",")[0]
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key=key, max_retries=0) as client:
            yield c, client


def prompt(c: Cluster) -> str:
    tokenizer = c.router.registry.model().tokenizer
    return tokenizer.decode(c.node.requests[-1].prompt, skip_special_tokens=False)


async def test_a_response_is_stored_continued_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        first = await client.responses.create(
            model="tiny", input="one two", instructions="three", metadata={"a": "b"}
        )
        assert (first.output_text, first.status) == ("hello world", "completed")
        assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
        assert prompt(c).startswith("<|start|>system\nthree")
        second = await client.responses.create(
            model="tiny",
            previous_response_id=first.id,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "stop"}]}],
        )
        text = prompt(c)
        assert "three" not in text  # instructions are of one response
        assert text.index("one two") < text.index("hello world") < text.index("stop")
        assert await client.responses.retrieve(first.id) == first
        items = await client.responses.input_items.list(second.id)
        assert [item.content[0].text for item in items.data] == ["stop"]
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(first.id)
        await client.responses.delete(first.id)
        for work in (
            client.responses.retrieve(first.id),
            client.responses.create(input="x", previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        unstored = await client.responses.create(input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


EVENTS = (
    "response.created", "response.in_progress", "response.output_item.added",
    "response.content_part.added", "response.output_text.delta", "response.output_text.done",
    "response.content_part.done", "response.output_item.done",
)  # fmt: skip


@pytest.mark.parametrize("limit", [100, 2])
def test_events_come_in_order_with_their_numbers(limit: int) -> None:
    with openai_client() as (c, client):
        stream = client.responses.create(input="hi", stream=True, max_output_tokens=limit)
        events: list[Any] = [*stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        status = "completed" if limit == 100 else "incomplete"
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == [*EVENTS, f"response.{status}"]
        last = events[-1].response
        deltas = [event.delta for event in events if event.type.endswith("text.delta")]
        assert "".join(deltas) == last.output_text and last.status == status
        assert c.stored(last.id).body == last.to_dict()
        with client.responses.stream(model="tiny", input="hi") as response_stream:
            final = response_stream.get_final_response()
        assert final.output_text == "hello world"


async def test_other_keys_do_not_see_a_response(tmp_path: Path) -> None:
    async with served(tmp_path, api_key="one,two") as (c, client):
        response = await client.responses.create(input="hi")
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="two") as other:
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(response.id)


WRONG: tuple[dict[str, Any], ...] = (
    {"background": True, "store": False},
    {"background": True, "stream": True},
    {"context_management": [{"type": "compaction"}]},
    {"input": [{"type": "compaction", "encrypted_content": "eA=="}]},
    {"include": ["file_search_call.results"]},
    {"top_logprobs": 2},
    {"text": {"verbosity": "brief"}},
    {"reasoning": {"summary": "long"}},
    {"reasoning": {"mode": "pro"}},
    {"prompt": {"id": "pmpt_1"}},
    {"conversation": "conv_1"},
    {"vllm_xargs": {"a": 1}},
    {"metadata": {"a" * 65: "x"}},
    {"tools": [{"type": "web_search"}]},
    {"input": []},
    {"truncation": "sometimes"},
    {"max_tool_calls": 0},
    {"temperature": 9},
    {"max_output_tokens": 0},
    {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
)


def test_unsupported_fields_are_rejected() -> None:
    with InProcessResponses() as c:
        for fields in WRONG:
            response = c.post("/v1/responses", **{"input": "hi", **fields})
            assert response.status_code == 400, fields


def test_fields_of_vllm_and_summaries_of_reasoning() -> None:
    with InProcessResponses(reply="<think>one</think>two", reasoning_parser="qwen3") as c:
        response = c.create(
            input="hi",
            reasoning={"summary": "detailed"},
            logit_bias={"5": -1},
            structured_outputs={"regex": "[a-z]+"},
        )
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert (
            response["reasoning"]["summary"] == "detailed"
            and response["output"][0]["summary"] == []
        )
        sampling = c.node.requests[-1].sampling
        assert dict(sampling.logit_bias) == {5: -1.0}
        assert sampling.structured_outputs.regex == "[a-z]+"
        hidden = c.create(input="hi", include_reasoning=False)
        assert [item["type"] for item in hidden["output"]] == ["message"]


@asynccontextmanager
async def store_with(
    max_items: int, now: list[float], path: Path | None = None, lifetime: float = 10.0
) -> AsyncIterator[ResponseStore]:
    """A store in memory or in a file."""
    database = Database(SCHEMA)
    await (database.open_in_memory() if path is None else database.open(path))
    try:
        yield ResponseStore(database, max_items, lifetime, lambda: now[0])
    finally:
        await database.close()


def ended(response_id: str, **fields: Any) -> StoredResponse:
    body: dict[str, Any] = {"id": response_id, "output": []}
    return StoredResponse(**({"owner": "", "body": body, "items": [], "earlier": []} | fields))


async def test_the_store_is_bounded_and_forgets() -> None:
    now = [0.0]
    async with store_with(2, now) as store:
        for name in "abc":
            await store.add(ended(name))
        await store.get("c", "")
        for name, owner in (("a", ""), ("c", "other")):
            with pytest.raises(ApiError):
                await store.get(name, owner)
        now[0] = 11.0
        with pytest.raises(ApiError):
            await store.get("c", "")


async def test_the_store_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 3 * store_module.RESPONSE_BYTES)
    async with store_with(100, [0.0]) as store:
        for name in "ab":
            await store.add(ended(name, items=[{"id": "i", "text": "x" * 100}]))
        await store.get("a", "")
        await store.add(ended("c"))
        with pytest.raises(ApiError):
            await store.get("a", "")
        await store.delete("b", "")
        await store.add(ended("d"))
        await store.get("c", "")  # the one that was deleted has left its room


async def test_stores_of_one_file_are_one_and_outlive_their_routers(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "router.sqlite3"
    async with store_with(2, now, path) as one, store_with(2, now, path) as other:
        await one.add(ended("a", items=[{"id": "i", "type": "x"}]))
        await other.add(ended("b"))
        assert (await other.get("a", "")).items == [{"id": "i", "type": "x"}]
        await one.delete("b", "")
        with pytest.raises(ApiError):
            await other.get("b", "")
    async with store_with(2, now, path) as later:
        assert (await later.get("a", "")).body == {"id": "a", "output": []}
        assert later.items_in_thread(["i"], "") == {"i": {"id": "i", "type": "x"}}


async def test_routers_of_one_host_share_responses(tmp_path: Path) -> None:
    async with (
        served(tmp_path, batch_dir=str(tmp_path / "shared")) as (_, one),
        served(tmp_path, batch_dir=str(tmp_path / "shared")) as (c, other),
    ):
        first = await one.responses.create(input="one two")
        assert await other.responses.retrieve(first.id) == first
        second = await other.responses.create(input="stop", previous_response_id=first.id)
        text = prompt(c)
        assert text.index("one two") < text.index("hello world") < text.index("stop")
        await other.responses.delete(first.id)
        for client in (one, other):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)
        assert await one.responses.retrieve(second.id) == second


async def test_a_storage_that_fails_takes_no_client_its_response(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):

        def fail(connection: sqlite3.Connection) -> None:
            connection.execute("DROP TABLE responses")

        await c.router.app._state.run(fail)
        response = await client.responses.create(input="hi")
        assert response.output_text == "hello world"
        with pytest.raises(openai.InternalServerError, match="storage failed"):
            await client.responses.retrieve(response.id)
