"""Requests that another node takes over: everything that they ask for goes with them, and counts
from their new beginning."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.openai.test_tools import TEMPLATE, WEATHER
from tandem.tests.router.support import (
    Cluster,
    FakeDecodeNode,
    admitted,
    cluster,
    finished,
    make_model,
    tokens_event,
    usage,
)

HI = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>one two</think>"
CALLS = '[{"name":"weather","parameters":{}}]'
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REASONED: dict[str, Any] = {"thinking_token_budget": 9}
# Path, body, answer of the model, and a field of the request to the node.
ASKED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "calls": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [WEATHER], "tool_choice": "required"} | REASONED,
        THOUGHT + CALLS,
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
# Ids, times, and where the request was served.
VARYING = re.compile(
    r'"(id|call_id|item_id|signature|created\w*|completed_at|\w+_duration|decode_nodes)":'
    r'\s*("[^"]*"|[\d.]+|\[[^]]*\])'
)


class Dying:
    """Nodes of which the first to be asked dies: before or after its output."""

    def __init__(self, c: Cluster, *, early: bool) -> None:
        self._early = early
        self.requests: list[pb.GenerateRequest] = []
        for node in c.nodes:
            node.script = partial(self._serve, node)

    async def _serve(
        self, node: FakeDecodeNode, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        if len(self.requests) > 1:
            async for event in node._talk(request, context):
                yield event
            return
        yield admitted()
        yield usage(request, cached_tokens=1)
        if not self._early:
            count = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
            yield tokens_event(0, [70, 71, 72], count)
        yield finished(0, pb.FINISH_REASON_ERROR, error="broken")


async def shown(c: Cluster, path: str, body: dict[str, Any]) -> str:
    answer: httpx.Response = await c.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return VARYING.sub(r'"\1":0', answer.text)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_begins_anew_with_all_that_was_asked_for(
    tmp_path: Path, stream: bool
) -> None:
    make_model(tmp_path / "model", TEMPLATE)
    async with cluster(tmp_path, nodes=2, reasoning_parser="qwen3") as c:
        for name, (path, fields, reply, field) in ASKED.items():
            body = fields | {"stream": stream}
            for node in c.nodes:
                node.reply, node.script = c.encode(reply), None
            want = await shown(c, path, body)
            # A stream whose client has received output cannot move.
            dying = Dying(c, early=stream)
            assert await shown(c, path, body) == want, name
            first, second = dying.requests
            assert second.sampling == first.sampling and second.prompt == first.prompt
            assert field in {field.name for field, _ in second.sampling.ListFields()}
            assert (first.deaths, second.deaths) == (0, 1)
