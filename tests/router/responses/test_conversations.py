"""References to stored items, compaction and counting, with OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.responses import continued_conversation
from tandem.router.responses.chat_turns import as_messages
from tandem.router.responses.compaction.context_management import compaction_threshold
from tandem.router.responses.input_items import decoded, encoded
from tandem.router.responses.response_store import ResponseStore, StoredResponse
from tandem.tests.router.openai.test_tools import PARAMETERS, TEMPLATE
from tandem.tests.router.responses.test_responses import prompt, served
from tandem.tests.router.support import (
    CONTEXT,
    Cluster,
    Script,
    admitted,
    finished,
    make_model,
    tokens_event,
    until,
    usage,
)

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS}


async def test_references_stand_for_stored_items(tmp_path: Path) -> None:
    async with served(tmp_path, api_key="one,two") as (c, client):
        first = await client.responses.create(
            input="one", include=["message.output_text.logprobs"], top_logprobs=1
        )
        [asked] = (await client.responses.input_items.list(first.id)).data
        items: list[Any] = [
            {"type": "item_reference", "id": asked.id},
            {"id": first.output[0].id},
            {"role": "user", "content": "stop"},
        ]
        second = await client.responses.create(input=items)
        shown = prompt(c)
        assert shown.index("user\none") < shown.index("assistant\nhello") < shown.index("stop")
        listed = (await client.responses.input_items.list(second.id, order="asc")).data
        assert [item.id for item in listed[:2]] == [asked.id, first.output[0].id]
        await client.responses.delete(first.id)
        await client.responses.create(input=items)  # the second one has them too
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="two") as other:
            with pytest.raises(openai.NotFoundError, match=r"input\[0\]"):
                await other.responses.create(input=items)
        await client.responses.delete(second.id)
        await client.responses.create(input=items[2:], store=False)
        for wrong, status in (({"id": "msg_x"}, 404), ({"id": 5}, 400), ({"id": ""}, 400)):
            answer = await c.client.post(
                "/v1/responses", json={"input": [wrong]}, headers={"authorization": "Bearer one"}
            )
            assert answer.status_code == status, answer.text


def test_the_newest_of_several_items_with_one_id_counts() -> None:
    now = [0.0]
    store = ResponseStore(2, 10.0, lambda: now[0])
    for i, name in enumerate("abc"):
        item = {"id": "x", "type": "message", "content": [{"text": name, "logprobs": [i]}]}
        body: dict[str, Any] = {"id": name, "output": [] if i % 2 else [item]}
        store.add(
            StoredResponse(
                owner="", body=body, items=[item] if i % 2 else [], conversation=[], size=1
            )
        )

    def found() -> list[str]:
        return [item["content"][0]["text"] for item in store.items(["x", "y"], "").values()]

    assert found() == ["c"] and store.items(["x"], "other") == {}
    assert "logprobs" not in store.items(["x"], "")["x"]["content"][0]
    store.delete("c", "")
    assert found() == ["b"]
    now[0] = 11.0
    assert found() == []


async def test_a_conversation_is_compacted_and_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        first = await client.responses.create(input="one")
        c.node.reply = c.encode(" the fox jumps ")
        compacted = await client.responses.compact(
            model="tiny", previous_response_id=first.id, input="two", instructions="be brief"
        )
        assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
        shown = prompt(c)
        assert shown.index("be brief") < shown.index("hello world") < shown.index("two\n\nWrite")
        assert c.node.requests[-1].sampling.max_tokens == CONTEXT // 8
        kept: list[Any] = [
            item.model_dump(exclude_none=True, warnings=False) for item in compacted.output
        ]
        assert [item["content"][0]["text"] for item in kept[:-1]] == ["one", "two"]
        assert kept[-1]["type"] == "compaction" and "fox" not in str(kept)
        again = await client.responses.create(input=[*kept, {"role": "user", "content": "three"}])
        shown = prompt(c)
        assert "user\none\n\ntwo<|end|>" in shown and "hello" not in shown
        assert "so far:\n\nthe fox jumps<|end|>\n<|start|>user\nthree" in shown
        more = await client.responses.compact(model="tiny", previous_response_id=again.id)
        assert [item.type for item in more.output] == ["message"] * 3 + ["compaction"]
        c.node.reply = c.encode(" ")
        with pytest.raises(openai.InternalServerError, match="no summary"):
            await client.responses.compact(model="tiny", input="one")
        for fields in (
            {"input": "one"},
            {"model": "tiny"},
            {"model": "tiny", "input": "one", "image": {}},
            {"model": "tiny", "input": [{"type": "compaction", "encrypted_content": "?"}]},
            {"model": "tiny", "input": "y" * 5000},
        ):
            answer = await c.client.post("/v1/responses/compact", json=fields)
            assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trigger_at_the_end_compacts_too(tmp_path: Path, stream: bool) -> None:
    async with served(tmp_path) as (c, client):
        first = await client.responses.create(input="one")
        c.node.reply = c.encode("the fox")
        asked: dict[str, Any] = {"input": [{"type": "compaction_trigger"}], "tools": [TOOL]}
        made = await client.responses.create(**asked, previous_response_id=first.id, stream=stream)
        if stream:
            events = [event async for event in made]
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds[2:] == ["output_item.added", "output_item.done", "completed"]
            assert [event.sequence_number for event in events] == list(range(5))
            made = events[-1].response
        [item] = made.output
        assert item.type == "compaction" and made.status == "completed"
        await client.responses.create(input="two", previous_response_id=made.id)
        assert "user\none<|end|>" in prompt(c) and "hello" not in prompt(c)
        assert "the fox<|end|>\n<|start|>user\ntwo" in prompt(c)
        for wrong in ([*asked["input"], {"role": "user", "content": "x"}], asked["input"]):
            answer = await c.client.post("/v1/responses", json={"input": wrong})
            assert answer.status_code == 400, answer.text


def test_messages_of_the_user_are_joined_only_after_a_compaction() -> None:
    said = [{"type": "message", "role": "user", "content": [{"text": text}]} for text in ("a", "b")]
    assert [message["content"] for message in as_messages(said)] == ["a", "b"]
    item = {"type": "compaction", "encrypted_content": encoded("c")}
    assert [message["role"] for message in as_messages([*said, item])] == ["user", "assistant"]


async def test_an_unfinished_message_is_continued(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, client):
        message: dict[str, Any] = {"role": "assistant", "type": "message", "id": "msg_1"}
        message |= {"content": [{"type": "output_text", "text": "one", "annotations": []}]}
        for status, end in (("incomplete", "assistant\none"), ("completed", "assistant\n")):
            turns: Any = [{"role": "user", "content": "hi"}, message | {"status": status}]
            made = await client.responses.create(input=turns)
            assert prompt(c).endswith(end) and made.output_text == "hello world"
            counted = await client.responses.input_tokens.count(input=turns)
            assert counted.input_tokens == made.usage.input_tokens


async def test_tokens_of_an_input_are_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with served(tmp_path) as (c, client):
        for fields in (
            {"input": "hi"},
            {"input": "hi", "instructions": "be brief", "tools": [TOOL]},
            {"input": "hi", "text": {"format": {"type": "json_object"}}},
        ):
            asked: dict[str, Any] = fields
            counted = await client.responses.input_tokens.count(**asked)
            made = await client.responses.create(**asked)
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == made.usage.input_tokens
        after = await client.responses.input_tokens.count(previous_response_id=made.id)
        assert after.input_tokens > counted.input_tokens
        turns: list[Any] = [{"role": "user", "content": "x" * 300}] * 3
        long = await client.responses.input_tokens.count(input=turns)
        assert long.input_tokens > CONTEXT
        cut = await client.responses.input_tokens.count(input=turns, truncation="auto")
        assert cut.input_tokens < CONTEXT
        for wrong in ({}, {"input": 5}, {"input": "x", "personality": "friendly"}):
            answer = await c.client.post("/v1/responses/input_tokens", json=wrong)
            assert answer.status_code == 400, answer.text
        assert len(c.node.requests) == 3


def managed(*thresholds: int | None) -> dict[str, Any]:
    entries = [{"type": "compaction", "compact_threshold": each} for each in thresholds]
    return {"context_management": entries}


TURNS: list[Any] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "x" * 1100},
    {"role": "user", "content": "two"},
]


def summarizing(c: Cluster) -> Script:
    """Writes a summary if it is asked for one, and an answer otherwise."""
    tokenizer = c.router.registry.model().tokenizer

    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateEvent]:
        asked = "Write a summary" in tokenizer.decode(request.prompt)
        yield admitted()
        yield usage(request)
        for token in c.encode(" the fox " if asked else "hello"):
            yield tokens_event(0, [token])
        yield finished(0, stop_token=0)

    return script


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_conversation_is_compacted_before_its_answer(
    tmp_path: Path, stored: bool, stream: bool
) -> None:
    async with served(tmp_path, context=4096) as (c, client):
        c.node.script = summarizing(c)
        asked: dict[str, Any] = {"store": stored, "max_output_tokens": 10, **managed(9000, 1000)}
        raw = {"enable_response_messages": True}
        made = await client.responses.create(input=TURNS, stream=stream, extra_body=raw, **asked)
        if stream:
            events = [event async for event in made]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds[2:5] == ["output_item.added", "output_item.done", "output_item.added"]
            made = events[-1].response
        summary, _ = made.output
        assert (summary.type, made.output_text, made.status) == ("compaction", "hello", "completed")
        summarized, answered = c.node.requests
        assert summarized.sampling.max_tokens == 4096 // 8 and answered.sampling.max_tokens == 10
        shown = prompt(c)
        assert "x" * 100 not in shown and "user\none<|end|>" in shown
        assert "so far:\n\nthe fox<|end|>\n<|start|>user\ntwo<|end|>" in shown
        assert made.usage.input_tokens == len(summarized.prompt) + len(answered.prompt)
        assert [message["message"] for message in made.output_messages[::2]] == [
            " the fox ",
            "hello",
        ]
        # The next turn begins with the same prompt, whoever keeps the conversation.
        following: dict[str, Any] = {"input": "three", "previous_response_id": made.id}
        if not stored:
            told = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
            following = {"input": [*TURNS, *told, {"role": "user", "content": "three"}]}
        later = await client.responses.create(**following, **asked)
        assert [item.type for item in later.output] == ["message"]
        assert (
            prompt(c) == shown + "hello<|end|>\n<|start|>user\nthree<|end|>\n<|start|>assistant\n"
        )
        if not stored:  # what precedes the summary may be left out
            pruned = following["input"][len(TURNS) :]
            await client.responses.create(input=pruned, **asked)
            assert prompt(c).startswith("<|start|>user\nSummary")


async def test_summary_and_answer_are_continued_on_another_node(tmp_path: Path) -> None:
    turns = ["the ", "fox", "hel", "lo"]
    async with served(tmp_path, nodes=2, context=4096) as (c, client):

        async def fail_first(request: pb.GenerateRequest, _: Any) -> AsyncIterator[Any]:
            yield admitted()
            yield usage(request)
            yield tokens_event(0, c.encode(turns.pop(0)))
            fails = len(turns) % 2 == 1
            yield finished(0, pb.FINISH_REASON_ERROR if fails else pb.FINISH_REASON_STOP)

        for node in c.nodes:
            node.script = fail_first
        extra = {"enable_response_messages": True}
        made = await client.responses.create(input=TURNS, **managed(1000), extra_body=extra)
        summary, message = made.output
        assert decoded(summary.encrypted_content) == "the fox" and turns == []
        assert message.content[0].text == "hello"
        wrote = [message["message"] for message in made.output_messages]
        assert wrote[::2] == ["the fox", "hello"]
        for node in c.nodes:
            node.script = None
            node.reply = c.encode(" ")
        with pytest.raises(openai.InternalServerError, match="no summary"):
            await client.responses.create(input=TURNS, **managed(1000))


async def test_a_compaction_waits_for_its_threshold_and_needs_room(tmp_path: Path) -> None:
    async with served(tmp_path, context=4096) as (c, client):
        c.node.script = summarizing(c)

        async def kinds(turns: list[Any], *thresholds: int | None, **fields: Any) -> list[str]:
            made = await client.responses.create(input=turns, **managed(*thresholds), **fields)
            return [item.type for item in made.output]

        length = (await client.responses.input_tokens.count(input=TURNS)).input_tokens
        assert await kinds(TURNS, length) == ["message"]
        assert await kinds(TURNS, length - 1) == ["compaction", "message"]
        assert await kinds([{"role": "user", "content": "x" * 1100}], 1000) == ["message"]
        longer: list[Any] = [*TURNS, {"role": "assistant", "content": "y" * 1900}]
        model = c.router.registry.model()
        assert compaction_threshold([{"type": "compaction"}], model, set()) == 3072
        full = [*longer, {"role": "assistant", "content": "z" * 600}, TURNS[0]]
        assert await kinds(full, 1000) == ["message"]  # no room for a summary
        called = [*TURNS, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
        results = {"type": "function_call_output", "call_id": "1", "output": "warm"}
        assert await kinds([*called, results], 1000) == ["compaction", "message"]
        assert "warm" not in prompt(c) and prompt(c).endswith("two<|end|>\n<|start|>assistant\n")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await kinds([{"role": "assistant", "content": "z" * 5000}, TURNS[0]], 1000)
        later = await client.responses.create(input=TURNS, background=True, **managed(1000))
        await until(lambda: c.router.app.services.runs.find(later.id, "") is None)
        ended = await client.responses.retrieve(later.id)
        assert [item.type for item in ended.output] == ["compaction", "message"]


MANAGED_WRONGLY: tuple[tuple[Any, str], ...] = (
    ([], "context_management"),
    ({}, "context_management"),
    ([5], "context_management[0]"),
    ([{"compact_threshold": 1000}], "context_management[0].type"),
    ([{"type": "trim"}], "context_management[0].type"),
    ([{"type": "compaction", "compact_threshold": 999}], "context_management[0].compact_threshold"),
    (
        [{"type": "compaction", "compact_threshold": "2k"}],
        "context_management[0].compact_threshold",
    ),
    ([{"type": "compaction"}] * 17, "context_management"),
)


async def test_wrong_context_management_is_rejected(tmp_path: Path) -> None:
    async with served(tmp_path) as (c, _):
        for wrong, param in MANAGED_WRONGLY:
            body = {"input": "hi", "context_management": wrong}
            answer = await c.client.post("/v1/responses", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, (
                answer.text
            )


async def test_a_conversation_has_a_bounded_number_of_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continued_conversation, "MAX_CONVERSATION", 4)
    async with served(tmp_path) as (_, client):
        listing: Any = {"type": "mcp_list_tools", "tools": []}
        question: Any = {"role": "user", "content": "hi"}
        first = await client.responses.create(input=[listing, question])
        second = await client.responses.create(input="hi", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="has 6 items; the limit is 4"):
            await client.responses.create(input="hi", previous_response_id=second.id)
