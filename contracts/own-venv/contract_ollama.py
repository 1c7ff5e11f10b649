# mypy: ignore-errors
"""The package ollama against a running server."""

from __future__ import annotations

import os

import ollama
import pytest

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
HEADERS = {"authorization": f"Bearer {KEY}"}
HI = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 8}


@pytest.fixture
def client():
    return ollama.Client(host=URL, headers=HEADERS, timeout=120)


def test_chat(client):
    response = client.chat(MODEL, messages=HI, options=SHORT)
    assert response.message.content and response.done and response.eval_count <= 8
    parts = list(client.chat(MODEL, messages=HI, options=SHORT, stream=True))
    assert parts[-1].done and "".join(part.message.content for part in parts)


def test_generate(client):
    assert client.generate(MODEL, prompt="one", options=SHORT).response
    parts = list(client.generate(MODEL, prompt="one", options=SHORT, stream=True))
    assert parts[-1].done_reason in ("stop", "length")


async def test_asynchronous_chat():
    client = ollama.AsyncClient(host=URL, headers=HEADERS, timeout=120)
    stream = await client.chat(MODEL, messages=HI, options=SHORT, stream=True)
    assert [part async for part in stream][-1].done


def test_a_format(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    response = client.chat(MODEL, messages=HI, format=schema, options={"num_predict": 200})
    assert response.message.content.startswith("{")


def test_models(client):
    assert client.list().models[0].model.startswith(MODEL)
    assert client.show(MODEL).details is not None
    assert client.ps() is not None


def test_embeddings(client):
    assert len(client.embed(MODEL, input=["one", "two"]).embeddings) == 2


def test_errors(client):
    with pytest.raises(ollama.ResponseError):
        client.chat("other", messages=HI)
