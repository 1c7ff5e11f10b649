"""Conversations as agents send them: tools in the history, system messages anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.tests.router.anthropic.test_messages import post_message
from tandem.tests.router.anthropic.test_thinking import prompts
from tandem.tests.router.in_process import InProcess, tiny

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


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


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
    texts = prompts(c, [{"system": SYSTEM, "messages": AGENT}, plain, hoisted])
    assert texts == [prompt] * 3


def test_tokens_are_counted() -> None:
    c = InProcess(tiny(TOOLS))
    body: dict[str, Any] = {"model": "tiny", "system": SYSTEM, "messages": AGENT}
    path = "/v1/messages/count_tokens"
    assert post_message(c, **body).status_code == 200
    counted = c.post(path, **body).json()
    assert counted["input_tokens"] == len(c.node.requests[0].prompt)
    for times in (1000, 100_000):  # of a context of 512
        long = body | {"messages": [{"role": "user", "content": "one " * times}]}
        assert c.post(path, **long).json()["input_tokens"] > 1000
    wrong = c.post(path, **body | {"messages": []})
    assert wrong.status_code == 400 and wrong.json()["type"] == "error"
    assert len(c.node.requests) == 1
