# mypy: ignore-errors
"""The package litellm against a running server, as OpenAI's and as Anthropic's API."""

from __future__ import annotations

import os

import litellm
import pytest

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
HI = [{"role": "user", "content": "hi"}]
OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY, "timeout": 120}
WAYS = {
    f"openai/{MODEL}": OPENAI,
    f"hosted_vllm/{MODEL}": OPENAI,
    f"anthropic/{MODEL}": {"api_base": URL, "api_key": KEY, "timeout": 120},
}


@pytest.mark.parametrize("model", WAYS)
def test_chat(model):
    response = litellm.completion(model=model, messages=HI, max_tokens=8, **WAYS[model])
    assert response.choices[0].message.content and response.usage.total_tokens


@pytest.mark.parametrize("model", WAYS)
async def test_stream(model):
    stream = await litellm.acompletion(
        model=model, messages=HI, max_tokens=8, stream=True, **WAYS[model]
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_text_completion():
    response = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="one", max_tokens=4, **OPENAI
    )
    assert response.choices[0].text


def test_embedding():
    response = litellm.embedding(model=f"openai/{MODEL}", input=["one"], **OPENAI)
    assert response.data[0]["embedding"]


def test_tools():
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    response = litellm.completion(
        model=f"openai/{MODEL}",
        messages=HI,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        max_tokens=200,
        **OPENAI,
    )
    assert response.choices[0].message.tool_calls[0].function.name == "f"


def test_errors():
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model=f"openai/{MODEL}", messages=HI, temperature=9, **OPENAI)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=f"openai/{MODEL}", messages=HI, **OPENAI | {"api_key": "x"})
