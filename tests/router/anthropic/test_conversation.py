"""Conversations as agents send them: tools in the history, system messages anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.anthropic.test_messages import HI, official_client
from tandem.tests.router.anthropic.test_thinking import prompts
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.support import cluster, make_model

TOOLS = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for call in m.tool_calls %}+{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% if m.role == 'tool' %}<{{ m.name }} {{ m.tool_call_id }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
STRICT = TOOLS.replace(
    "{{ m.role }}",
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{{ m.role }}",
    1,
)
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def result(call: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **fields}


AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": [text("list", **CACHED), text("files")]},
    {
        "role": "assistant",
        "content": [
            text("look"),
            {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"at": "/"}, **CACHED},
            {"type": "tool_use", "id": "toolu_2", "name": "cat", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            result("toolu_1", [text("a"), text("b")], **CACHED),
            result("toolu_2", "no such file", is_error=True),
        ],
    },
    {"role": "system", "content": "5 left"},
    {"role": "assistant", "content": "so"},
    {"role": "system", "content": [text("4 left")]},
    {"role": "user", "content": "go"},
    {"role": "user", "content": "on"},
]
SYSTEM = [text(BILLING), text("be brief", **CACHED)]
BEFORE = (
    'system=be brief\nuser=list\nfiles\nassistant=look+ls{"at": "/"}+cat{}\n'
    "tool=a\nb<ls toolu_1\ntool=Error: no such file"
)
IN_PLACE = BEFORE + "<cat toolu_2\nsystem=5 left\nassistant=so\nsystem=4 left\nuser=go\non\n"
FOLDED = BEFORE + "\n\n5 left<cat toolu_2\nassistant=so\nuser=4 left\n\ngo\non\n"


@pytest.mark.parametrize(("template", "prompt"), [(TOOLS, IN_PLACE), (STRICT, FOLDED)])
def test_the_prompt_of_an_agent(template: str, prompt: str) -> None:
    hoisted = {"messages": [{"role": "system", "content": "be brief"}, *AGENT]}
    c = InProcess(tiny(template))
    plain = {"system": f"{BILLING}\nbe brief", "messages": AGENT}
    rendered = prompts(c, [{"system": SYSTEM, "messages": AGENT}, plain, hoisted])
    assert rendered == [prompt] * 3


async def test_a_request_as_claude_code_sends_it(tmp_path: Path) -> None:
    """With its query, headers and beta fields; unknown ones are accepted."""
    fields: dict[str, Any] = {
        "system": SYSTEM,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "speed": "standard",
        "stream": True,
        "some_new_beta": {"type": "x"},
    }
    headers = {
        "x-api-key": "secret",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    async with cluster(tmp_path, api_key="secret") as c:
        assert (await c.client.head("/", headers=headers)).status_code == 200
        path = "/v1/messages?beta=true"
        response = await c.client.post(path, json=HI | fields, headers=headers)
        assert response.status_code == 200 and "event: message_stop" in response.text
        assert response.headers["request-id"]


async def test_tokens_are_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TOOLS)
    body = {"model": "tiny", "system": SYSTEM, "messages": AGENT}
    path = "/v1/messages/count_tokens"
    async with cluster(tmp_path) as c, official_client(c) as client:
        assert (await c.client.post("/v1/messages", json=HI | body)).status_code == 200
        counted = await client.messages.count_tokens(**body)
        assert counted.input_tokens == len(c.node.requests[0].prompt)
        beta = await client.beta.messages.count_tokens(**body, betas=["token-counting-2024-11-01"])
        assert beta.input_tokens == counted.input_tokens
        for times in (1000, 100_000):  # of a context of 512
            long = body | {"messages": [{"role": "user", "content": "one " * times}]}
            assert (await c.client.post(path, json=long)).json()["input_tokens"] > 1000
        wrong = await c.client.post(path, json=body | {"messages": []})
        assert wrong.status_code == 400 and wrong.json()["type"] == "error"
        assert len(c.node.requests) == 1
