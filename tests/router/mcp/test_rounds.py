"""Requests whose calls the router runs, on chat completions and responses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.http.json_body import parse_text
from tandem.router.mcp.chat import McpChat
from tandem.router.mcp.rounds import MAX_CALLS_IN_ROUND
from tandem.router.mcp.server_tools import CallOutcome, McpListing, McpTool
from tandem.router.requests import call_arguments
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.openai.test_tools import NOW, TEMPLATE
from tandem.tests.router.support import (
    HELD_BY_LARGEST,
    TRIES,
    Cluster,
    admitted,
    cluster,
    events,
    finished,
    held_briefly,
    make_model,
    tokens_event,
    usage,
)

ADD = McpTool(name="add", description="Add.", schema={"type": "object"}, read_only=True)
DROP = McpTool(name="drop", schema={"type": "object"})
SERVER = {"type": "mcp", "server_label": "s"}
CLIENTS = {"type": "function", "name": "now"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class FakeServers:
    """Servers whose tools return at once; ``called`` records their calls."""

    def __init__(self) -> None:
        self.called: list[tuple[str, str, str]] = []
        self.result = ""
        self.listings = {
            "s": McpListing(label="s", tools=(ADD, DROP)),
            "broken": McpListing(label="broken", error="The server is not available (OSError)."),
        }

    async def call(self, label: str, tool: str, arguments: str) -> CallOutcome:
        self.called.append((label, tool, arguments))
        if tool == "drop":
            return CallOutcome(text="not allowed", failed=True, by_tool=True)
        return CallOutcome(text=self.result or f"result {len(self.called)}")


def with_replies(c: InProcess | Cluster, replies: Sequence[str]) -> None:
    """Have the node give one reply after the other, and then the last one again."""
    rest = list(replies)

    async def talk(request: Any, context: Any) -> AsyncIterator[Any]:
        c.node.reply = c.encode(rest.pop(0) if len(rest) > 1 else rest[0])
        async for event in c.node._talk(request, context):
            yield event

    c.node.script = talk


@contextmanager
def rounds(*replies: str, **options: Any) -> Iterator[tuple[InProcessResponses, FakeServers]]:
    """A router in this process whose node gives these replies."""
    servers = FakeServers()
    with InProcessResponses(tiny(TEMPLATE), context=4096, servers=servers, **options) as c:
        with_replies(c, replies)
        yield c, servers


@asynccontextmanager
async def served(
    tmp_path: Path, *replies: str, **options: Any
) -> AsyncIterator[tuple[Cluster, FakeServers]]:
    """A cluster whose node gives these replies."""
    make_model(tmp_path / "model", TEMPLATE)
    async with cluster(tmp_path, context=4096, **options) as c:
        servers: Any = FakeServers()
        handler = c.router.app.handler
        c.router.app.services.chat = McpChat(servers, handler.parsers, handler.prompts)
        with_replies(c, replies)
        yield c, servers


TWO_ROUNDS = (
    "I add." + call("s__add", a=1),
    "More." + call("s__drop") + call("s__add", a=2),
    "Done.",
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_runs_rounds_until_the_final_reply(stream: bool) -> None:
    with rounds(*TWO_ROUNDS) as (c, servers):
        response = c.chat(tools=[SERVER, NOW], stream=stream)
        assert response.status_code == 200, response.text
        if stream:
            deltas = [x["choices"][0]["delta"] for x in events(response.text)[:-1]]
            assert not any("tool_calls" in delta for delta in deltas)
            text = "".join(delta.get("content", "") for delta in deltas)
            calls = [one for delta in deltas for one in delta.get("mcp_calls", ())]
            reasons = [x["choices"][0]["finish_reason"] for x in events(response.text)[:-1]]
            assert [reason for reason in reasons if reason] == ["stop"]
        else:
            [choice] = response.json()["choices"]
            text, calls = choice["message"]["content"], choice["message"]["mcp_calls"]
            assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
            usage = response.json()["usage"]
            assert usage["prompt_tokens"] == sum(len(r.prompt) for r in c.node.requests)
        assert text == "I add.More.Done."
        assert [(one["name"], one["status"], one["output"]) for one in calls] == [
            ("add", "completed", "result 1"),
            ("drop", "failed", None),
            ("add", "completed", "result 3"),
        ]
        assert calls[1]["error"]["content"][0]["text"] == "not allowed"
        assert [arguments for _, _, arguments in servers.called] == ['{"a": 1}', "{}", '{"a": 2}']
        prompt = c.prompt()
        assert "I add.[s__add]" in prompt and "tool\nresult 1" in prompt
        assert "Error: not allowed" in prompt and len(c.node.requests) == 3


def test_mcp_calls_of_a_chat_can_be_sent_back() -> None:
    with rounds(*TWO_ROUNDS) as (c, _):
        message = c.chat(tools=[SERVER]).json()["choices"][0]["message"]
        history = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "x"}]
        response = c.post("/v1/chat/completions", messages=history)
        assert response.status_code == 200, response.text
        text = c.prompt()
        assert "[s__add][s__drop][s__add]" in text and "tool\nresult 3" in text
        assert text.index("result 3") < text.index("I add.More.Done.")
        for wrong in ([5], [{"id": "x"}], [{**message["mcp_calls"][0], "name": ""}]):
            body = {"messages": [{"role": "assistant", "mcp_calls": wrong}]}
            response = c.post("/v1/chat/completions", **body)
            assert response.status_code == 400 and "messages[0].mcp_calls[0]" in response.text


def test_a_response_has_items_and_events_of_each_call() -> None:
    with rounds(*TWO_ROUNDS) as (c, _):
        client = c.openai()
        tools: Any = [SERVER, {"type": "mcp", "server_label": "broken"}]
        extra = {"enable_response_messages": True}
        stream = client.responses.create(input="hi", tools=tools, stream=True, extra_body=extra)
        events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert [item.type for item in last.output] == [
            "mcp_list_tools", "mcp_list_tools", "message", "mcp_call", "message", "mcp_call",
            "mcp_call", "message",
        ]  # fmt: skip
        assert [tool.name for tool in last.output[0].tools] == ["add", "drop"]
        assert "not available" in last.output[1].error
        failed = [event.type for event in events if getattr(event, "output_index", 0) == 5]
        assert list(dict.fromkeys(failed)) == [
            "response.output_item.added", "response.mcp_call.in_progress",
            "response.mcp_call_arguments.delta", "response.mcp_call_arguments.done",
            "response.mcp_call.failed", "response.output_item.done",
        ]  # fmt: skip
        assert last.output[5].error.content[0]["text"] == "not allowed"
        assert last.output[6].output == "result 3" and last.status == "completed"
        read = [*last.input_messages, *last.output_messages[1::2]]
        assert [m["tokens"] for m in read] == [list(one.prompt) for one in c.node.requests]
        assert last.output_messages[-1]["message"] == "Done." and len(last.output_messages) == 5
        # The calls stay in the conversation.
        again = client.responses.create(input="again", previous_response_id=last.id, tools=[SERVER])
        assert "tool\nresult 3" in c.prompt() and again.output_text == "Done."
        whole = client.responses.create(input=[*last.output, {"role": "user", "content": "x"}])
        assert "tool\nresult 1" in c.prompt() and whole.status == "completed"


def test_a_result_that_does_not_fit_ends_the_rounds() -> None:
    with rounds(call("s__add", a=1), "Done.") as (c, servers):
        servers.result = "z" * 5000
        body = {"input": "hi", "tools": [SERVER]}
        response = c.create(**body)
        assert response["status"] == "incomplete" and len(c.node.requests) == 1


def test_calls_of_client_tools_end_the_loop() -> None:
    both = call("s__add", a=1) + call("now")
    with rounds(both) as (c, servers):
        message = c.chat(tools=[SERVER, NOW]).json()["choices"][0]
        assert message["finish_reason"] == "tool_calls" and len(servers.called) == 1
        [own] = message["message"]["tool_calls"]
        assert own["function"]["name"] == "now"
        assert [one["name"] for one in message["message"]["mcp_calls"]] == ["add"]
        chunks = events(c.chat(tools=[SERVER, NOW], stream=True).text)[:-1]
        deltas = [x["choices"][0]["delta"] for x in chunks]
        numbers = [t["index"] for delta in deltas for t in delta.get("tool_calls", ())]
        assert set(numbers) == {0}
        response = c.create(input="hi", tools=[SERVER, CLIENTS])
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["mcp_list_tools", "mcp_call", "function_call"]


def test_rounds_calls_and_tokens_are_bounded() -> None:
    endless = call("s__add", a=1) * 2
    with rounds(endless, mcp_max_rounds=3) as (c, servers):
        choice = c.chat(tools=[SERVER]).json()["choices"][0]
        # The last round has no calls: what looks like one is text.
        assert len(servers.called) == 6 and choice["message"]["content"] == endless
        body = {"input": "hi", "tools": [SERVER], "max_tool_calls": 1}
        response = c.create(**body)
        outcomes = [i["error"] for i in response["output"] if i["type"] == "mcp_call"]
        assert outcomes[0] is None and "limit of calls" in outcomes[1]["message"]
        assert len(servers.called) == 7 and response["max_tool_calls"] == 1
        c.create(**body | {"max_tool_calls": 3})
        assert len(servers.called) == 10, "two in the first round and one in the second"
        tokens = len(c.encode(endless)) + 1
        for limit in (tokens, tokens + 5):
            response = c.chat(tools=[SERVER], max_tokens=limit).json()
            assert response["choices"][0]["finish_reason"] == "length"
            assert response["usage"]["completion_tokens"] <= limit
        c.node.requests.clear()
        body |= {"max_output_tokens": 20}
        response = c.create(**body)
        assert (
            response["status"] == "incomplete" and response["output"][-1]["status"] == "incomplete"
        )


async def test_a_round_is_continued_when_its_node_fails(tmp_path: Path) -> None:
    turns = [call("s__add", a=1), call("s__add", a=1), "Done.", "Done."]
    async with served(tmp_path, "") as (c, servers):
        await c.add("decode-1")

        async def fail_first(request: Any, context: Any) -> AsyncIterator[Any]:
            reply = c.encode(turns.pop(0))
            yield admitted()
            yield usage(request)
            fails, half = len(turns) % 2 == 1, len(reply) // 2
            assert fails or list(request.resume[0].tokens) == reply[:half]
            yield tokens_event(0, reply[:half] if fails else reply[half:])
            yield finished(0, pb.FINISH_REASON_ERROR if fails else pb.FINISH_REASON_STOP)

        for node in c.nodes:
            node.script = fail_first
        choice = (await c.chat(tools=[SERVER])).json()["choices"][0]
        assert choice["message"]["content"] == "Done." and turns == []
        assert [each["output"] for each in choice["message"]["mcp_calls"]] == ["result 1"]
        assert servers.called == [("s", "add", '{"a": 1}')]


def test_tool_choice_names_tools_of_servers() -> None:
    required = '[{"name":"s__add","parameters":{}}]'
    with rounds(required, "Done.") as (c, servers):
        choice = {"type": "mcp", "server_label": "s", "name": "add"}
        response = c.chat(tools=[SERVER, NOW], tool_choice=choice)
        assert response.json()["choices"][0]["message"]["content"] == "Done."
        first, second = c.node.requests
        assert first.sampling.HasField("structured_outputs") and len(servers.called) == 1
        assert not second.sampling.HasField("structured_outputs")
        only = SERVER | {"allowed_tools": {"read_only": True}}
        c.chat(tools=[only], tool_choice="none")
        assert "s__add" in c.prompt() and "s__drop" not in c.prompt()


INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tools": [SERVER | {"server_url": "http://10.0.0.1"}]}, "tools[0].server_url"),
    ({"tools": [SERVER | {"connector_id": "connector_gmail"}]}, "tools[0].connector_id"),
    ({"tools": [SERVER | {"headers": {"a": "b"}}]}, "tools[0].headers"),
    ({"tools": [SERVER | {"authorization": "x"}]}, "tools[0].authorization"),
    ({"tools": [NOW, {"type": "mcp", "server_label": "x"}]}, "tools[1].server_label"),
    ({"tools": [SERVER, SERVER]}, "tools[1].server_label"),
    ({"tools": [SERVER | {"require_approval": "always"}]}, "tools[0].require_approval"),
    ({"tools": [SERVER | {"allowed_tools": 5}]}, "tools[0].allowed_tools"),
    ({"tools": [SERVER], "n": 2}, "n"),
    ({"tools": [SERVER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
)


def test_requests_use_configured_servers_only() -> None:
    with rounds("x") as (c, servers):
        for fields, param in INVALID:
            response = c.chat(**fields)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param, response.text
        assert servers.called == []
    response = InProcess().chat(tools=[SERVER])
    assert response.status_code == 400 and "--mcp-config" in response.text


def test_tools_are_offered_to_chats_without_any_if_the_router_says_so() -> None:
    with rounds(call("s__add", a=1), mcp_offer_tools=True) as (c, servers):
        message = c.chat().json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "s__add" and not servers.called
        c.chat(tools=[NOW])
        assert "s__add" not in c.prompt()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_large_results_do_not_hold_the_loop(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def arguments(text: str) -> Any:
        threads.add(threading.current_thread().name)
        return parse_text(text)

    monkeypatch.setattr(call_arguments, "parse_text", arguments)
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "input": "hi", "tools": [SERVER], "stream": True}
    calls = call("s__add", a=[1]) * MAX_CALLS_IN_ROUND
    async with served(tmp_path, "hi", *[calls] * TRIES) as (c, servers):
        servers.result = "é\n" * 100_000

        def send_request() -> str:
            return httpx.post(c.url + path, json=body, timeout=60, verify=False).text

        await asyncio.to_thread(send_request)
        servers.called.clear()
        text = await held_briefly(send_request, HELD_BY_LARGEST)
    # The results are too long for the prompt of another round.
    assert len(servers.called) % MAX_CALLS_IN_ROUND == 0 and servers.called
    assert text.count("é") >= MAX_CALLS_IN_ROUND * 100_000
    assert threads and "MainThread" not in threads
