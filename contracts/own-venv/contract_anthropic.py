# mypy: ignore-errors
"""The package anthropic against a running server."""

from __future__ import annotations

import os

import anthropic
import pytest

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Ys", "Oz"]}},
                     "required": ["city"], "additionalProperties": False},
}  # fmt: skip


@pytest.fixture
def client():
    with anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120) as response:
        yield response


def test_a_message(client):
    response = client.messages.create(model=MODEL, max_tokens=8, messages=HI, system="Be brief.")
    assert response.content[0].text and response.usage.output_tokens <= 8


def test_a_stream(client):
    with client.messages.stream(model=MODEL, max_tokens=8, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text and final.stop_reason in ("end_turn", "max_tokens")


async def test_an_asynchronous_stream():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, timeout=120) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=8, messages=HI, stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}],
)
def test_forced_tools(client, choice):
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=HI, tools=[TOOL], tool_choice=choice
    ) as stream:
        final = stream.get_final_message()
    tool_uses = [block for block in final.content if block.type == "tool_use"]
    assert tool_uses[0].input["city"] in ("Ys", "Oz") and final.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "sunny"} for b in tool_uses]
    turns = [*HI, {"role": "assistant", "content": final.content},
             {"role": "user", "content": results}]  # fmt: skip
    again = client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    assert again.role == "assistant"


def test_counting(client):
    assert client.messages.count_tokens(model=MODEL, messages=HI).input_tokens > 0


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=0, messages=HI)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=HI)
