"""Anthropic's client, whose import takes more than a second: each test does it, in one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.anthropic.test_conversation import AGENT, SYSTEM, TOOLS
from tandem.tests.router.anthropic.test_messages import HI
from tandem.tests.router.anthropic.test_thinking import REASONED, THINKING
from tandem.tests.router.anthropic.test_tool_use import CALL, OFFERING, ON, REQUEST
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.support import cluster


def official_client(c: InProcess) -> Any:
    import anthropic
    import httpx2

    connection = c.client(httpx2)
    return anthropic.Anthropic(
        base_url="http://router", api_key="none", max_retries=0, http_client=connection
    )


def test_the_official_client() -> None:
    c = InProcess()
    client = official_client(c)
    whole = client.messages.create(**HI, system="stop", extra_body={"temperature": 0.5})
    assert (whole.content[0].text, whole.stop_reason) == ("hello world", "end_turn")
    with client.messages.stream(**HI) as stream:
        text = [*stream.text_stream]
        final = stream.get_final_message()
    assert "".join(text) == final.content[0].text == "hello world"
    assert len(text) > 1 and final.usage.output_tokens == whole.usage.output_tokens == 3
    assert final.usage.input_tokens + 3 == len(c.node.requests[1].prompt)
    client.messages.create(**HI, tools=[{"name": "f", "input_schema": {}}])
    assert '{"name": "f", "parameters": {}}' in c.prompt()


async def test_the_official_client_with_keys(tmp_path: Path) -> None:
    import anthropic

    async with cluster(tmp_path, api_key="secret") as c:
        for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            async with anthropic.AsyncAnthropic(base_url=c.url, max_retries=0, **key) as client:
                assert [each.id async for each in await client.models.list()] == ["tiny"]
                assert (await client.models.retrieve("tiny")).display_name == "tiny"
                assert (await client.messages.create(**HI)).role == "assistant"
                with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                    await client.messages.create(**(HI | {"model": "other"}))
        wrong = anthropic.AsyncAnthropic(base_url=c.url, max_retries=0, api_key="wrong")
        async with wrong as client:
            with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
                await client.messages.create(**HI)


def test_the_official_client_reads_reasoning() -> None:
    c = InProcess(reply=REASONED, reasoning_parser="qwen3")
    client = official_client(c)
    with client.messages.stream(**(HI | THINKING)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= set(kinds)
    thought, content = final.content
    assert (thought.thinking, content.text) == ("one two", "\n\nthree") and thought.signature
    beta = client.beta.messages.create(**(HI | THINKING), betas=["effort-2025-11-24"])
    assert beta.content[0].thinking == "one two"


def test_the_official_client_collects_calls() -> None:
    c = InProcess(tiny(OFFERING), reply=f"hello\n{CALL}\n{CALL}", **ON)
    with official_client(c).messages.stream(**(HI | REQUEST)) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == {"at": "/a"}


def test_the_official_client_counts_tokens() -> None:
    c = InProcess(tiny(TOOLS))
    client = official_client(c)
    body: dict[str, Any] = {"model": "tiny", "system": SYSTEM, "messages": AGENT}
    client.messages.create(**(HI | body))
    counted = client.messages.count_tokens(**body)
    assert counted.input_tokens == len(c.node.requests[0].prompt)
    beta = client.beta.messages.count_tokens(**body, betas=["token-counting-2024-11-01"])
    assert beta.input_tokens == counted.input_tokens
