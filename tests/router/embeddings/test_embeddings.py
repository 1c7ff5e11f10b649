"""POST /v1/embeddings, with OpenAI's client and without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.tests.router.support import CONTEXT, Cluster, cluster, make_model, vector


@pytest.fixture
async def c(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


async def embed(c: Cluster, value: Any = "hi", **fields: Any) -> Any:
    response = await c.client.post("/v1/embeddings", json={"input": value, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def rejected(c: Cluster, value: Any = "hi", **fields: Any) -> Any:
    response = await c.client.post("/v1/embeddings", json={"input": value, **fields})
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
        for value, prompts in inputs:
            created = await client.embeddings.create(model="tiny", input=value)  # requests base64
            plain = await client.embeddings.create(
                model="tiny", input=value, encoding_format="float"
            )
            assert [item.embedding for item in created.data] == list(map(vector, prompts))
            assert plain.data == created.data
            assert [item.index for item in created.data] == list(range(len(prompts)))
            tokens = sum(map(len, prompts))
            assert (created.usage.prompt_tokens, created.usage.total_tokens) == (tokens, tokens)
            assert (created.object, created.model) == ("list", "tiny")


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


async def test_texts_are_cut_within_their_special_tokens(c: Cluster) -> None:
    """This tokenizer has none; the tests of tokenizers cover those of encoders."""
    text = "one two three stop here hello world"
    ids = c.encode(text)
    cases: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"truncate_prompt_tokens": 5}, ids[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ({"truncate_prompt_tokens": -1}, ids),
    )
    for fields, expected in cases:
        for value in (text, ids):
            await embed(c, value, **fields)
            assert list(c.node.requests[-1].prompt) == expected


async def test_a_text_beyond_the_context_is_refused_or_cut(c: Cluster) -> None:
    long = "one two three " * CONTEXT
    for value in (long, c.encode(long)):
        error = await rejected(c, value)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert "set 'truncate_prompt_tokens' to -1" in error["message"]
        await embed(c, value, truncate_prompt_tokens=-1)
        assert list(c.node.requests[-1].prompt) == c.encode(long)[:CONTEXT]
    # Far beyond the context, like documents.
    await embed(c, " one" * 7_000, truncate_prompt_tokens=-1)
    error = await rejected(c, " one" * 10_000, truncate_prompt_tokens=-1)
    assert "A text that is cut may have at most 16384 tokens" in error["message"]


async def test_a_text_follows_the_prompt_that_the_request_names(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    prompts = {"query": "find: ", "none": "", "document": "text: "}
    sentence = {"prompts": prompts, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(sentence))
    async with cluster(tmp_path, nodes=0) as c:
        await c.add(scoring="vectors")
        cases: list[tuple[str | None, str]] = [(None, "text: "), *prompts.items()]
        for name, prompt in cases:
            await embed(c, "hi", prompt_name=name)
            assert list(c.node.requests[-1].prompt) == c.encode(prompt + "hi")
        await embed(c, [5, 6])
        assert list(c.node.requests[-1].prompt) == [5, 6]
        error = await rejected(c, prompt_name="other")
        assert error["param"] == "prompt_name" and "'query', 'none'" in error["message"]
        assert (await rejected(c, [5], prompt_name="query"))["param"] == "prompt_name"
        await c.client.post("/rerank", json={"query": "a", "documents": ["b"]})
        encoded = sorted(list(request.prompt) for request in c.node.requests[-2:])
        assert encoded == sorted([c.encode("find: a"), c.encode("text: b")])
        await c.client.post("/api/embed", json={"model": "tiny", "input": "hi"})
        assert list(c.node.requests[-1].prompt) == c.encode("text: hi")


async def test_many_inputs_keep_their_order(c: Cluster) -> None:
    prompts = [[5] * (1 + i % 7) for i in range(200)]
    data = (await embed(c, prompts))["data"]
    assert [item["embedding"] for item in data] == list(map(vector, prompts))


async def test_invalid_inputs_are_rejected(c: Cluster) -> None:
    for value, word in (
        ("", "empty"),
        ([], "empty"),
        (["a", ""], "input[1]"),
        ([[1], []], "input[1]"),
        ([[1], "a"], "only strings"),
        ({"a": 1}, "a string or an array"),
        ([1, 9999], "input[1]"),
        ([5] * (CONTEXT + 1), "maximum context length"),
        (["a"] * 2049, "2048"),
    ):
        error = await rejected(c, value)
        assert word in error["message"] and error["param"].startswith("input"), error
    for fields in (
        {"encoding_format": "bytes"},
        {"dimensions": 0},
        {"truncate_prompt_tokens": 0},
        {"prompt_name": "query"},
        {"embed_dtype": "float16"},
    ):
        assert (await rejected(c, **fields))["param"] == next(iter(fields))
    assert not c.node.requests
