"""POST /v1/embeddings, with OpenAI's client and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.tests.router.support import CONTEXT, Cluster, cluster, vector


@pytest.fixture
async def c(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def embed(c: Cluster, given: Any = "hi", **fields: Any) -> Any:
    response = await c.client.post("/v1/embeddings", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def rejected(c: Cluster, given: Any = "hi", **fields: Any) -> Any:
    response = await c.client.post("/v1/embeddings", json={"input": given, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_openai_client_gets_vectors_of_every_kind_of_input(c: Cluster) -> None:
    texts = ["hello", "one two three", "hello"]
    ids = [c.encode(text) for text in texts]
    inputs: list[tuple[Any, list[list[int]]]] = [
        ("hello", ids[:1]),
        (texts, ids),
        (ids[1], ids[1:2]),
        (ids, ids),
    ]
    async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="x", max_retries=0) as client:
        for given, prompts in inputs:
            made = await client.embeddings.create(model="tiny", input=given)  # asks for base64
            plain = await client.embeddings.create(
                model="tiny", input=given, encoding_format="float"
            )
            assert [item.embedding for item in made.data] == list(map(vector, prompts))
            assert plain.data == made.data
            assert [item.index for item in made.data] == list(range(len(prompts)))
            tokens = sum(map(len, prompts))
            assert (made.usage.prompt_tokens, made.usage.total_tokens) == (tokens, tokens)
            assert (made.object, made.model) == ("list", "tiny")


async def test_nodes_get_the_pooling_of_the_router_and_the_options_of_the_request(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, pooling="mean") as c:
        [item] = (await embed(c, dimensions=3, normalize=False, priority=5))["data"]
        assert item["embedding"] == vector(c.encode("hi"))[:3]
        request = c.node.requests[-1]
        assert (request.embed.pooling, request.embed.normalize) == ("mean", False)
        assert (request.embed.dimensions, request.priority) == (3, 5)
        await embed(c)
        assert c.node.requests[-1].embed.normalize


async def test_many_inputs_keep_their_order(c: Cluster) -> None:
    prompts = [[5] * (1 + i % 7) for i in range(200)]
    data = (await embed(c, prompts))["data"]
    assert [item["embedding"] for item in data] == list(map(vector, prompts))


async def test_invalid_inputs_are_rejected(c: Cluster) -> None:
    for given, word in (
        ("", "empty"),
        ([], "empty"),
        (["a", ""], "input[1]"),
        ([[1], []], "input[1]"),
        ([[1], "a"], "only strings"),
        ({"a": 1}, "a string or an array"),
        ([1, 9999], "input[1]"),
        ([5] * CONTEXT, "maximum context length"),
        (["a"] * 2049, "2048"),
    ):
        error = await rejected(c, given)
        assert word in error["message"] and error["param"].startswith("input"), error
    for fields in (
        {"encoding_format": "bytes"},
        {"dimensions": 0},
        {"truncate_prompt_tokens": 5},
        {"embed_dtype": "float16"},
    ):
        assert (await rejected(c, **fields))["param"] == next(iter(fields))
    assert not c.node.requests


async def test_older_nodes_get_no_request_for_a_vector(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        await c.add("decode-0", capabilities=frozenset())
        response = await c.client.post("/v1/embeddings", json={"input": "hi"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "capability_unavailable"
        assert not c.node.requests
