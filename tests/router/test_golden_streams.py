"""What clients read of each kind of response, byte for byte; Anthropic's and Ollama's responses are
recorded by the tests of those APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tandem.proto import tandem_pb2 as pb
from tandem.tests.router.golden import check_golden
from tandem.tests.router.in_process import tiny
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import admitted, cluster, tokens_event, usage

TEMPLATE = (
    "{% for t in tools or [] %}<tool_call> {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "<|start|>assistant\n"
)
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
WEATHER = {"type": "function", "function": FUNCTION}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "one"}
CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ys"}}\n</tool_call>'
THOUGHT = f"<think>\none two\n</think>\n\nI look.\n{CALL}"
TOOL = {"type": "function", **FUNCTION}
SCORED = {"logprobs": True, "top_logprobs": 1, **IDS}

# Name, path, reply of the model, body.
REQUESTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("chat_whole", CHATS, "hello world", {**CHAT, **SCORED}),
    ("chat_stream", CHATS, "hello world", {**CHAT, **STREAM, "n": 2}),
    (
        "chat_logprobs",
        CHATS,
        "hello",
        {**CHAT, **USAGE, **SCORED},
    ),
    ("chat_tools", CHATS, THOUGHT, {**CHAT, **STREAM, "tools": [WEATHER]}),
    ("chat_tools_whole", CHATS, THOUGHT, {**CHAT, "tools": [WEATHER]}),
    ("completion_whole", TEXTS, "two three", {**TEXT, "logprobs": 1, "prompt_logprobs": 1}),
    ("completion_stream", TEXTS, "two three", {**TEXT, **USAGE, "logprobs": 1, **IDS}),
    ("completion_echo", TEXTS, "two", {**TEXT, **STREAM, "echo": True, "logprobs": 0}),
    ("completion_cut", TEXTS, "two three here", {**TEXT, **STREAM, "max_tokens": 2}),
    ("response_whole", RESPONSES, "hello world", {"input": "hi"}),
    ("response_stream", RESPONSES, "hello world", {"input": "hi", **STREAM}),
    ("response_tools", RESPONSES, THOUGHT, {"input": "hi", "tools": [TOOL], **STREAM}),
)


def test_responses_and_streams_are_the_golden_ones() -> None:
    with InProcessResponses(tiny(TEMPLATE), reasoning_parser="qwen3") as c:
        for name, path, reply, body in REQUESTS:
            c.node.reply = c.encode(reply)
            response = c.post(path, **body)
            assert response.status_code == 200, response.text
            check_golden(name, response.text)


async def test_streams_that_fail_end_as_the_golden_ones(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:

        async def dying(request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
            yield admitted()
            yield usage(request)
            yield tokens_event(0, c.encode("hello"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        for path, body in ((CHATS, CHAT), (TEXTS, TEXT), (RESPONSES, {"input": "hi"})):
            whole = await c.client.post(path, json=body)
            assert whole.headers["content-type"].startswith("application/json")
        c.node.script = dying
        for name, path, body in (("chat", CHATS, CHAT), ("completion", TEXTS, TEXT)):
            stream = await c.client.post(path, json=body | STREAM)
            assert stream.headers["content-type"].startswith("text/event-stream")
            check_golden(f"{name}_error", stream.text)
