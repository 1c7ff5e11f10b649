"""Requests that another node takes over: it continues the output so far, and clients cannot see
where the first node failed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster import admin
from tandem.shared.telemetry.logs import current_log_context
from tandem.tests.router.openai.test_tools import TEMPLATE, WEATHER
from tandem.tests.router.support import (
    Cluster,
    FakeDecodeNode,
    admitted,
    cluster,
    events,
    finished,
    make_model,
    tokens_event,
    usage,
)

HI = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>one two</think>"
TOOL_CALLS = '[{"name":"weather","parameters":{}}]'
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REASONED: dict[str, Any] = {"thinking_token_budget": 9}
# Path, body, output of the model, and a field of the request to the node.
REQUESTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "calls": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [WEATHER], "tool_choice": "required"} | REASONED,
        THOUGHT + TOOL_CALLS,
        "structured_outputs",
    ),
    "a format and logprobs": (
        "/v1/chat/completions",
        {"messages": HI, "response_format": FORMAT, "logprobs": True, "top_logprobs": 2},
        THOUGHT + '{"a":true}',
        "logprobs",
    ),
    "logprobs": (
        "/v1/completions",
        {"prompt": "hi", "logprobs": 2, "structured_outputs": {"choice": ["one", "two"]}},
        "one",
        "structured_outputs",
    ),
    "a response": (
        "/v1/responses",
        {"input": "hi", "store": False} | REASONED,
        THOUGHT + "three",
        "thinking",
    ),
    "Anthropic": (
        "/v1/messages",
        {"model": "tiny", "messages": HI, "max_tokens": 99}
        | {"thinking": {"type": "enabled", "budget_tokens": 9}},
        THOUGHT + "three",
        "thinking",
    ),
    "Ollama": (
        "/api/chat",
        {"model": "tiny", "messages": HI, "stream": False},
        THOUGHT + "three",
        "max_tokens",
    ),
}
# Ids, times, and nodes.
VARYING = re.compile(
    r'"(id|call_id|item_id|signature|created\w*|completed_at|\w+_duration|decode_nodes)":'
    r'\s*("[^"]*"|[\d.]+|\[[^]]*\])'
)


class Dying:
    """Nodes; the first one that gets a request dies after ``count`` events."""

    def __init__(self, c: Cluster, count: int) -> None:
        self._count = count
        self.requests: list[pb.GenerateRequest] = []
        self.events = 0
        for node in c.nodes:
            node.script = partial(self._serve, node)

    async def _serve(
        self, node: FakeDecodeNode, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        first = not self.requests
        self.requests.append(request)
        async for event in node._talk(request, context):
            if first and self.events == self._count:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            self.events += first
            yield event

    @property
    def moved(self) -> bool:
        return len(self.requests) > 1


async def response_text(c: Cluster, path: str, body: dict[str, Any]) -> str:
    response: httpx.Response = await c.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return VARYING.sub(r'"\1":0', response.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_continued_wherever_its_node_dies(
    tmp_path: Path, name: str, stream: bool
) -> None:
    """Events, text, tool calls, logprobs, finish reasons and usage equal those of an undisturbed
    request."""
    make_model(tmp_path / "model", TEMPLATE)
    async with cluster(tmp_path, nodes=2, reasoning_parser="qwen3") as c:
        path, fields, reply, field = REQUESTS[name]
        body = fields | {"stream": stream}
        for node in c.nodes:
            node.reply = c.encode(reply)
        expected = await response_text(c, path, body)
        count = 0
        while (
            (dying := Dying(c, count))
            and await response_text(c, path, body) == expected
            and dying.moved
        ):
            first, second = dying.requests
            assert second.prompt == first.prompt and second.internal_id != first.internal_id
            assert field in {field.name for field, _ in second.sampling.ListFields()}
            assert second.sampling.seed == first.sampling.seed
            count += 1
        assert not dying.moved, f"another response after {count} events"
        assert count > len(c.node.reply), "it died after each event"


async def test_a_choice_that_has_ended_is_not_continued(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:

        async def dies(request: pb.GenerateRequest, context: Any) -> Any:
            yield admitted()
            yield usage(request, cached_tokens=2)
            yield tokens_event(0, [70, 71])
            yield tokens_event(1, [72, 73, 74])
            yield finished(1)
            for node in c.nodes:
                node.script = None
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        for node in c.nodes:
            node.reply, node.script = [70, 71, 75], dies
        body = {"n": 3, "return_token_ids": True, "max_tokens": 5}
        choices = (response := (await c.complete("hi", **body)).json())["choices"]
        assert [choice["token_ids"] for choice in choices] == [
            [70, 71, 75, 0],
            [72, 73, 74],
            [70, 71, 75, 0],
        ]
        (resumed,) = [request for node in c.nodes for request in node.requests if request.resume]
        assert [(one.index, list(one.tokens)) for one in resumed.resume] == [(0, [70, 71]), (2, [])]
        # Prompt tokens that the first node had cached.
        assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert response["usage"]["completion_tokens"] == 11


async def test_a_complete_output_without_its_end_is_not_moved(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2) as c:

        async def dies(request: pb.GenerateRequest, context: Any) -> Any:
            yield admitted()
            yield usage(request)
            yield tokens_event(0, [70, 71])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        for node in c.nodes:
            node.script = dies
        response = (await c.complete("hi", max_tokens=2, return_token_ids=True)).json()
        assert response["choices"][0]["finish_reason"] == "length"
        assert response["choices"][0]["token_ids"] == [70, 71]
        assert sum(len(node.requests) for node in c.nodes) == 1


async def test_logprobs_of_a_prompt_are_shown_once(tmp_path: Path) -> None:
    """They come in pieces, and the next node sends the first ones again."""
    async with cluster(tmp_path, nodes=2) as c:
        body = {"prompt": list(range(3, 203)), "prompt_logprobs": 1, "max_tokens": 3}
        expected = (await c.client.post("/v1/completions", json=body)).json()
        for count in range(9):
            dying = Dying(c, count)
            body_back = (await c.client.post("/v1/completions", json=body)).json()
            assert body_back["choices"] == expected["choices"]
            has_prompt_logprobs = dying.requests[1].sampling.HasField("prompt_logprobs")
            assert has_prompt_logprobs == (count < 6), (
                "once all four pieces have come, they are left out"
            )


async def test_a_stream_ends_with_its_node_where_the_limit_is_0(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=2, migration_limit=0) as c:
        Dying(c, 3)
        assert events((await c.chat(stream=True)).text)[-1]["error"]["code"] == "node_failed"
        Dying(c, 3)
        assert (await c.chat()).status_code == 503
        Dying(c, 2)
        assert (await c.chat()).status_code == 200, "without output it is tried anew"


@pytest.mark.parametrize("drains", [False, True])
async def test_migrations_are_counted_by_reason(tmp_path: Path, drains: bool) -> None:
    details = "this node is draining, and its time is over" if drains else "Socket closed"
    async with cluster(tmp_path, nodes=2) as c:

        async def ends(request: pb.GenerateRequest, context: Any) -> Any:
            yield admitted()
            yield usage(request)
            yield tokens_event(0, [70])
            for node in c.nodes:
                node.script = None
            await context.abort(grpc.StatusCode.UNAVAILABLE, details)

        for node in c.nodes:
            node.script = ends
        assert events((await c.chat(stream=True)).text)[-1] == "[DONE]"
        reason = "draining" if drains else "failed"
        line = f'tandem_requests_migrated_total{{reason="{reason}"}} 1.0'
        assert line in c.router.metrics.render().decode()
        requests = [request for node in c.nodes for request in node.requests]
        assert sorted(request.deaths for request in requests) == [0, 0 if drains else 1]


async def test_a_moved_request_has_each_prefill_node_once_and_its_id_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        contexts.append(current_log_context().request_id)
        return True

    monkeypatch.setattr(logging.getLogger("tandem.router"), "filters", [note])
    async with cluster(tmp_path, nodes=3) as c:
        *_, prefill = c.nodes
        assert prefill.beat is not None
        prefill.beat.cancel()
        registry = f"127.0.0.1:{c.router.registry_port}"
        await asyncio.to_thread(admin.set_role, registry, prefill.node_id, "prefill")
        await c.registry.Join(prefill.join_request(c.model, role=pb.ROLE_PREFILL))
        dying = Dying(c, 1)
        contexts.clear()
        response = await c.complete("hi", max_tokens=4)
        assert response.status_code == 200 and dying.moved
        for request in dying.requests:
            assert [each.node_id for each in request.prefill] == [prefill.node_id]
        assert set(contexts) == {response.headers["x-request-id"]}
