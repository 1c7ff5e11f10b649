"""Tools: offered to the template, called in blocks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tandem.tests.router.anthropic.test_conversation import TOOLS
from tandem.tests.router.anthropic.test_messages import HI, ask, official_client, text_block
from tandem.tests.router.golden import check_golden
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.support import cluster, make_model

LS: dict[str, Any] = {
    "name": "ls",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASKED: dict[str, Any] = {"max_tokens": 200, "tools": [LS]}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"at": "/a"}}\n</tool_call>'
ON: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
OFFERING = "{% for t in tools or () %}{{ t.function.name }}!{% endfor %}" + TOOLS


def offering(tmp_path: Path) -> None:
    make_model(tmp_path / "model", OFFERING)


async def test_a_call_is_a_block_after_the_text(tmp_path: Path) -> None:
    offering(tmp_path)
    async with cluster(tmp_path, **ON) as c, official_client(c) as client:
        c.node.reply = c.encode(f"hello\n{CALL}\n{CALL}")

        async def post(**fields: Any) -> httpx.Response:
            return await c.client.post("/v1/messages", json=HI | ASKED | fields)

        whole = (await post()).json()
        assert c.prompt().startswith("ls!user=hi")
        streamed = await post(stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        check_golden("anthropic_tool_use", streamed.text)
        async with client.messages.stream(**(HI | ASKED)) as stream:
            final = await stream.get_final_message()
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        single = (await post(tool_choice=alone)).json()
    assert whole["stop_reason"] == final.stop_reason == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    call, other = whole["content"][1:]
    assert (call["name"], call["input"]) == ("ls", {"at": "/a"})
    assert call["id"].startswith("toolu_") and call["id"] != other["id"]
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == {"at": "/a"}
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]


def test_a_call_that_is_cut_off_ends_with_max_tokens() -> None:
    c = InProcess(tiny(OFFERING), reply=CALL, **ON)
    cut = ASKED | {"max_tokens": len(c.node.reply) - 15}
    assert ask(c, **cut).json()["stop_reason"] == "max_tokens"


def test_tools_that_must_not_be_used_are_not_offered() -> None:
    c = InProcess(tiny(OFFERING), reply=CALL)
    body = ask(c, **ASKED, tool_choice={"type": "none"}).json()
    assert c.prompt().startswith("user=hi")
    assert body["content"] == [text_block(CALL)]
