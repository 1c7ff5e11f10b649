"""The longest time that each API blocks the event loop, with bodies and responses near their
limits. The client runs in its own thread, so that its work does not count.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.support import (
    admitted,
    cluster,
    finished,
    held_briefly,
    make_model,
    tokens_event,
)

CONTEXT = 131_072
OFFERING = (
    "{% for t in tools or () %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{{ m.tool_calls and '' if m.role == 'tool' else '' }}{% endfor %}"
)
ON: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
MODEL: dict[str, Any] = {"model": "tiny"}
VALUES = [1, [2], {"b": "c"}] * 250
CALL = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'a': VALUES}})}</tool_call>"
SCHEMA = {"type": "object", "properties": {f"p{i}": {"enum": [1, 2]} for i in range(6000)}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
F: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
ANTHROPIC_F = [{"name": "f", "input_schema": {"type": "object"}}]
LONG = "wor " * 25_000
ECHO = {"echo": True, "max_tokens": 1, "stream": True, "return_token_ids": True}

# Path, body, and the node's output.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": (
        "/v1/messages",
        MODEL | {"max_tokens": 60_000, "messages": HI, "tools": ANTHROPIC_F},
        CALL,
    ),
    "ollama, streamed": ("/api/chat", MODEL | {"messages": HI, "tools": F}, CALL),
    "ollama": ("/api/chat", MODEL | {"messages": HI, "tools": F, "stream": False}, CALL),
    "responses with large tools": (
        "/v1/responses",
        {"input": "hi", "tools": [FUNCTION], "instructions": LONG, "stream": True},
        "hello",
    ),
    "responses with a call": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "custom", "name": "f"}], "stream": True},
        CALL,
    ),
    "responses with logprobs": (
        "/v1/responses",
        {"input": "hi", "stream": True, "top_logprobs": 20}
        | {"include": ["message.output_text.logprobs"]},
        "hello world " * 100,
    ),
    "chat that echoes": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "add_generation_prompt": False, "n": 16}
        | ECHO,
        "hello",
    ),
    "completion that echoes": ("/v1/completions", {"prompt": LONG, "n": 8} | ECHO, "hello"),
    "64 long prompts": (
        "/v1/completions",
        {"prompt": ["wor " * 4_000] * 64, "max_tokens": 1, "stream": True},
        "hello",
    ),
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}, ""),
}


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60, verify=False)


async def test_large_requests_hold_the_loop_for_milliseconds(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model", OFFERING)
    async with cluster(tmp_path, context=CONTEXT, **ON) as c:
        c.node.reply = c.encode("hi")
        # The first request of a kind imports modules.
        await asyncio.to_thread(post, f"{c.url}/v1/messages", CASES["messages"][1])
        for case, (path, body, reply) in CASES.items():
            c.node.reply, c.node.chunk = c.encode(reply), 8
            response = await held_briefly(partial(post, c.url + path, body))
            assert response.status_code == 200, (case, response.text[:500])


async def test_a_list_of_ten_thousand_files_holds_the_loop_for_milliseconds(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "batches"
    async with cluster(tmp_path, batch_dir=str(folder)) as c:
        with closing(sqlite3.connect(folder / "batches.sqlite3")) as connection, connection:
            connection.executemany(
                "INSERT INTO files (id, owner, purpose, filename, bytes, created_at, complete)"
                " VALUES (?, '', 'batch', 'in.jsonl', 5, 1, 1)",
                [(f"file-{number}",) for number in range(10_000)],
            )
        url = f"{c.url}/v1/files?limit=10000"
        response = await held_briefly(partial(httpx.get, url, timeout=60))
        assert len(response.json()["data"]) == 10_000, response.text[:300]


async def test_a_burst_of_tokens_holds_the_loop_for_milliseconds(tmp_path: Path) -> None:
    async with cluster(tmp_path, context=CONTEXT) as c:
        tokens = c.encode("hello world ") * 5

        async def burst(request: pb.GenerateRequest, context: Any) -> Any:
            yield admitted()
            for _ in range(4):
                for index in range(request.sampling.n):
                    yield tokens_event(index, tokens)
            for index in range(request.sampling.n):
                yield finished(index, pb.FINISH_REASON_LENGTH)

        c.node.script = burst
        stops = [f"hello worlds{i}" for i in range(64)]
        body = {"prompt": "hi", "n": 64, "max_tokens": 400, "stop": stops}
        response = await held_briefly(partial(post, f"{c.url}/v1/completions", body))
        assert response.json()["choices"][63]["text"] == "hello world " * 20
