"""The requests of coding agents, as they send them: Claude Code and Goose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.tests.router.anthropic.test_messages import named_events, post_message
from tandem.tests.router.anthropic.test_tool_use import CALL, OFFERING, ON
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.support import cluster, make_model

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": (
        "claude-code-20250219,oauth-2025-04-20,interleaved-thinking-2025-05-14,"
        "context-management-2025-06-27,fine-grained-tool-streaming-2025-05-14"
    ),
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.0.14 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-helper-method": "stream",
}
TOOL = {
    "name": "ls",
    "description": "Lists files.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
# The second request of a session: a call of a tool, its result, and a reminder.
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "two", "signature": "bXNn"},
            {"type": "text", "text": "three"},
            {"type": "tool_use", "id": "toolu_01", "name": "ls", "input": {"at": "/"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_01",
                "content": [{"type": "text", "text": "fox"}],
                "is_error": False,
            },
            {"type": "text", "text": "<system-reminder>dog</system-reminder>", **CACHED},
        ],
    },
]
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "messages": TURNS,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0; cch=1;"},
        {"type": "text", "text": "stop", **CACHED},
        {"type": "text", "text": "here", **CACHED},
    ],
    "tools": [TOOL, TOOL | {"name": "cat", **CACHED}],
    "metadata": {"user_id": "user_0_account__session_0"},
    "max_tokens": 200,
    "temperature": 1,
    "thinking": {"budget_tokens": 199, "type": "enabled"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}


async def test_claude_code(tmp_path: Path) -> None:
    """A session: is the server there, how long is the prompt, a quick question without tools for
    the title, and the main request."""
    make_model(tmp_path / "model", OFFERING)
    quick = {
        "model": "tiny",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": REQUEST["metadata"],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "speed": "standard",
        "some_new_beta": {"type": "x"},  # no reason to fail
    }
    title = quick | {
        "max_tokens": 30,
        "system": [{"type": "text", "text": "one"}],
        "tools": [],
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {"title": {"type": "string"}},
                    "required": ["title"],
                    "additionalProperties": False,
                },
            }
        },
        "stream": True,
    }
    count_fields = {name: REQUEST[name] for name in ("model", "messages", "tools")}
    async with cluster(tmp_path, **ON, reasoning_parser="qwen3") as c:
        c.client.headers.update(CLAUDE_CODE)
        assert (await c.client.head("/")).status_code == 200
        for path, body in (
            ("/v1/messages/count_tokens?beta=true", count_fields),
            ("/v1/messages?beta=true", quick),
            ("/v1/messages?beta=true", title),
        ):
            response = await c.client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.headers["request-id"]
        c.node.reply = c.encode("<think>one</think>" + CALL)
        response = await c.client.post("/v1/messages?beta=true", json=REQUEST)
        events = named_events(response.text)
        request = c.node.requests[-1]
        tokenizer = c.router.registry.model().tokenizer
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
    for word in ("stop", "here", "one", "three", "fox", "dog", "ls!cat!"):
        assert word in prompt
    assert "billing" not in prompt
    assert request.sampling.thinking.tokens == 199
    blocks = [event["content_block"] for event in events if "content_block" in event]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_goose() -> None:
    """Goose streams with tools whose last is cached; its OpenAI provider asks for usage."""
    c = InProcess(tiny(OFFERING), reply=CALL, **ON)
    response = post_message(
        c,
        messages=TURNS,
        system=[{"type": "text", "text": "stop", **CACHED}],
        tools=[TOOL | CACHED],
        max_tokens=200,
        temperature=0.5,
        stream=True,
    )
    events = named_events(response.text)
    (block,) = [event["content_block"] for event in events if "content_block" in event]
    assert block["type"] == "tool_use" and block["name"] == "ls"
    deltas = [event["delta"] for event in events if "index" in event and "delta" in event]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"at": "/a"}'
    chat = c.chat("one", model="tiny", stream=True, stream_options={"include_usage": True})
    assert chat.status_code == 200
