# mypy: ignore-errors
"""The package openai, synchronous and not, against a running server."""

from __future__ import annotations

import io
import json
import os
import time
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

URL, KEY = os.environ["TARGET_URL"] + "/v1", os.environ["TARGET_KEY"]
MODEL = os.environ["TARGET_MODEL"]
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ys", "Oz"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: Literal["Ys", "Oz"]
    large: bool


@pytest.fixture
def client():
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=120) as response:
        yield response


@pytest.fixture
async def later():
    async with openai.AsyncOpenAI(
        base_url=URL, api_key=KEY, max_retries=0, timeout=120
    ) as response:
        yield response


def test_chat(client):
    response = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=8, logprobs=True)
    assert response.choices[0].message.content and response.usage.total_tokens > 8
    assert response.choices[0].logprobs.content[0].token


def test_chat_stream_helper(client):
    # The helper raises if a message is truncated.
    with client.chat.completions.stream(
        model=MODEL, messages=HI, max_tokens=200, stop=[" ", "!", "."]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].message.content


async def test_chat_stream_async(later):
    options = {"include_usage": True}
    stream = await later.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=8, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens and not chunks[-1].choices


def test_parse(client):
    response = client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=City, max_tokens=200, temperature=0.2, seed=1
    )
    assert isinstance(response.choices[0].message.parsed, City)


def test_forced_tool(client):
    response = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,
    )
    [call, *_] = response.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Ys", "Oz")
    messages = [
        *HI,
        response.choices[0].message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": each.id, "content": "sunny"}
            for each in response.choices[0].message.tool_calls
        ),
    ]
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    assert again.choices[0].finish_reason


def test_streamed_tool(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
        stream=True,
    )
    calls = [call for c in stream for call in (c.choices[0].delta.tool_calls or [])]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    assert json.loads("".join(call.function.arguments or "" for call in calls))["city"]


def test_completions(client):
    response = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=4, n=2, logprobs=2, echo=True, stop=["."]
    )
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.choices[2].text.startswith("two")
    stream = client.completions.create(model=MODEL, prompt="one", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def test_responses(client):
    first = client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
    assert first.output_text
    second = client.responses.create(
        model=MODEL, input="and", previous_response_id=first.id, max_output_tokens=16
    )
    assert client.responses.retrieve(second.id).id == second.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_stream(client):
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_embeddings(client):
    response = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert (
        len(response.data) == 2 and abs(sum(x * x for x in response.data[0].embedding) - 1) < 1e-3
    )


def test_models(client):
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert error.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


def test_a_batch(client):
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": MODEL, "messages": HI, "max_tokens": 4}
    lines = io.BytesIO(json.dumps(line | {"body": body}).encode())
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(120):
        if (batch := client.batches.retrieve(batch.id)).status == "completed":
            break
        time.sleep(0.5)
    result = json.loads(client.files.content(batch.output_file_id).text)
    assert result["response"]["status_code"] == 200
    client.files.delete(file.id)
