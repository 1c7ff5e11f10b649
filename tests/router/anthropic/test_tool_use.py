"""Tools: offered to the template, called in blocks of their own."""

from __future__ import annotations

from typing import Any

from tandem.tests.router.anthropic.test_conversation import TOOLS
from tandem.tests.router.anthropic.test_messages import post_message, text_block
from tandem.tests.router.golden import check_golden
from tandem.tests.router.in_process import InProcess, tiny

LS: dict[str, Any] = {
    "name": "ls",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
REQUEST: dict[str, Any] = {"max_tokens": 200, "tools": [LS]}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"at": "/a"}}\n</tool_call>'
ON: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
OFFERING = "{% for t in tools or () %}{{ t.function.name }}!{% endfor %}" + TOOLS


def test_a_call_is_a_block_after_the_text() -> None:
    c = InProcess(tiny(OFFERING), reply=f"hello\n{CALL}\n{CALL}", **ON)
    whole = post_message(c, **REQUEST).json()
    assert c.prompt().startswith("ls!user=hi")
    check_golden("anthropic_tool_use", post_message(c, **REQUEST, stream=True).text)
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    single = post_message(c, **REQUEST, tool_choice=alone).json()
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    call, other = whole["content"][1:]
    assert (call["name"], call["input"]) == ("ls", {"at": "/a"})
    assert call["id"].startswith("toolu_") and call["id"] != other["id"]
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]


def test_a_call_that_is_cut_off_ends_with_max_tokens() -> None:
    c = InProcess(tiny(OFFERING), reply=CALL, **ON)
    cut = REQUEST | {"max_tokens": len(c.node.reply) - 15}
    assert post_message(c, **cut).json()["stop_reason"] == "max_tokens"


def test_tools_that_must_not_be_used_are_not_offered() -> None:
    c = InProcess(tiny(OFFERING), reply=CALL)
    body = post_message(c, **REQUEST, tool_choice={"type": "none"}).json()
    assert c.prompt().startswith("user=hi")
    assert body["content"] == [text_block(CALL)]
