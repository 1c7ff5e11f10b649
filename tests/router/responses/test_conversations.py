"""References to stored items, unfinished messages and counting, with OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.router.responses import continued_conversation
from tandem.tests.router.in_process import tiny
from tandem.tests.router.in_process_responses import openai_client
from tandem.tests.router.openai.test_tools import PARAMETERS, TEMPLATE
from tandem.tests.router.responses.test_responses import ended, prompt, served, store_with
from tandem.tests.router.support import CONTEXT

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS}


async def test_references_stand_for_stored_items(tmp_path: Path) -> None:
    async with served(tmp_path, api_key="one,two") as (c, client):
        first = await client.responses.create(
            input="one", include=["message.output_text.logprobs"], top_logprobs=1
        )
        [input_item] = (await client.responses.input_items.list(first.id)).data
        items: list[Any] = [
            {"type": "item_reference", "id": input_item.id},
            {"id": first.output[0].id},
            {"role": "user", "content": "stop"},
        ]
        second = await client.responses.create(input=items)
        text = prompt(c)
        assert text.index("user\none") < text.index("assistant\nhello") < text.index("stop")
        listed_items = (await client.responses.input_items.list(second.id, order="asc")).data
        assert [item.id for item in listed_items[:2]] == [input_item.id, first.output[0].id]
        await client.responses.delete(first.id)
        await client.responses.create(input=items)  # the second one has them too
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="two") as other:
            with pytest.raises(openai.NotFoundError, match=r"input\[0\]"):
                await other.responses.create(input=items)
        await client.responses.delete(second.id)
        await client.responses.create(input=items[2:], store=False)
        for wrong, status in (({"id": "msg_x"}, 404), ({"id": 5}, 400), ({"id": ""}, 400)):
            response = await c.client.post(
                "/v1/responses", json={"input": [wrong]}, headers={"authorization": "Bearer one"}
            )
            assert response.status_code == status, response.text


async def test_the_newest_of_items_with_equal_ids_is_used() -> None:
    now = [0.0]
    async with store_with(2, now) as store:
        for i, name in enumerate("abc"):
            item = {"id": "x", "type": "message", "content": [{"text": name, "logprobs": [i]}]}
            body: dict[str, Any] = {"id": name, "output": [] if i % 2 else [item]}
            await store.add(ended(name, body=body, items=[item] if i % 2 else []))

        def texts() -> list[str]:
            items = store.items_in_thread(["x", "y"], "")
            return [item["content"][0]["text"] for item in items.values()]

        assert texts() == ["c"] and store.items_in_thread(["x"], "other") == {}
        assert "logprobs" not in store.items_in_thread(["x"], "")["x"]["content"][0]
        await store.delete("c", "")
        assert texts() == ["b"]
        now[0] = 11.0
        assert texts() == []


def test_an_unfinished_message_is_continued() -> None:
    with openai_client() as (c, client):
        message: dict[str, Any] = {"role": "assistant", "type": "message", "id": "msg_1"}
        message |= {"content": [{"type": "output_text", "text": "one", "annotations": []}]}
        for status, end in (("incomplete", "assistant\none"), ("completed", "assistant\n")):
            turns: Any = [{"role": "user", "content": "hi"}, message | {"status": status}]
            response = client.responses.create(input=turns)
            assert c.prompt().endswith(end) and response.output_text == "hello world"
            count = client.responses.input_tokens.count(input=turns)
            assert count.input_tokens == response.usage.input_tokens


def test_tokens_of_an_input_are_counted() -> None:
    with openai_client(tiny(TEMPLATE)) as (c, client):
        for fields in (
            {"input": "hi"},
            {"input": "hi", "instructions": "be brief", "tools": [TOOL]},
            {"input": "hi", "text": {"format": {"type": "json_object"}}},
        ):
            body: dict[str, Any] = fields
            count = client.responses.input_tokens.count(**body)
            response = client.responses.create(**body)
            assert count.object == "response.input_tokens"
            assert count.input_tokens == response.usage.input_tokens
        after = client.responses.input_tokens.count(previous_response_id=response.id)
        assert after.input_tokens > count.input_tokens
        turns: list[Any] = [{"role": "user", "content": "x" * 300}] * 3
        long = client.responses.input_tokens.count(input=turns)
        assert long.input_tokens > CONTEXT
        truncated = client.responses.input_tokens.count(input=turns, truncation="auto")
        assert truncated.input_tokens < CONTEXT
        for wrong in ({}, {"input": 5}, {"input": "x", "personality": "friendly"}):
            invalid = c.post("/v1/responses/input_tokens", **wrong)
            assert invalid.status_code == 400, invalid.text
        assert len(c.node.requests) == 3


def test_a_conversation_has_a_bounded_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued_conversation, "MAX_CONVERSATION", 4)
    with openai_client() as (_, client):
        listing: Any = {"type": "mcp_list_tools", "tools": []}
        question: Any = {"role": "user", "content": "hi"}
        first = client.responses.create(input=[listing, question])
        second = client.responses.create(input="hi", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="has 6 items; the limit is 4"):
            client.responses.create(input="hi", previous_response_id=second.id)
