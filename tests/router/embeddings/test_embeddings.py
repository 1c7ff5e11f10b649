"""POST /v1/embeddings, with OpenAI's client and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.in_process import InProcess, load_tokenizer
from tandem.tests.router.support import CONTEXT, make_model, vector


@pytest.fixture
def c() -> InProcess:
    return InProcess()


def embed(c: InProcess, inputs: Any = "hi", **fields: Any) -> Any:
    response = c.post("/v1/embeddings", input=inputs, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def rejected(c: InProcess, inputs: Any = "hi", **fields: Any) -> Any:
    response = c.post("/v1/embeddings", input=inputs, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_openai_client_gets_vectors_of_every_kind_of_input(c: InProcess) -> None:
    texts = ["hello", "one two three", "hello"]
    ids = [c.encode(text) for text in texts]
    inputs: list[tuple[Any, list[list[int]]]] = [
        ("hello", ids[:1]),
        (texts, ids),
        (ids[1], ids[1:2]),
        (ids, ids),
    ]
    client = c.openai()
    for value, prompts in inputs:
        response = client.embeddings.create(model="tiny", input=value)  # asks for base64
        plain = client.embeddings.create(model="tiny", input=value, encoding_format="float")
        assert [item.embedding for item in response.data] == list(map(vector, prompts))
        assert plain.data == response.data
        assert [item.index for item in response.data] == list(range(len(prompts)))
        tokens = sum(map(len, prompts))
        assert (response.usage.prompt_tokens, response.usage.total_tokens) == (tokens, tokens)
        assert (response.object, response.model) == ("list", "tiny")


def test_nodes_get_the_pooling_of_the_router_and_the_options_of_the_request() -> None:
    c = InProcess(pooling="mean")
    [item] = embed(c, dimensions=3, normalize=False, priority=5)["data"]
    assert item["embedding"] == vector(c.encode("hi"))[:3]
    request = c.node.requests[-1]
    assert (request.embed.pooling, request.embed.normalize) == ("mean", False)
    assert (request.embed.dimensions, request.priority) == (3, 5)
    embed(c)
    assert c.node.requests[-1].embed.normalize


def test_texts_are_cut_within_their_special_tokens(c: InProcess) -> None:
    """This tokenizer has none; those of encoders are in the tests of tokenizers."""
    text = "one two three stop here hello world"
    ids = c.encode(text)
    cases: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"truncate_prompt_tokens": 5}, ids[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ({"truncate_prompt_tokens": -1}, ids),
    )
    for fields, expected in cases:
        for value in (text, ids):
            embed(c, value, **fields)
            assert list(c.node.requests[-1].prompt) == expected


def test_a_text_beyond_the_context_is_refused_or_cut(c: InProcess) -> None:
    long = "one two three " * CONTEXT
    for value in (long, c.encode(long)):
        error = rejected(c, value)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert "set 'truncate_prompt_tokens' to -1" in error["message"]
        embed(c, value, truncate_prompt_tokens=-1)
        assert list(c.node.requests[-1].prompt) == c.encode(long)[:CONTEXT]
    # Far beyond the context, as documents are.
    embed(c, " one" * 7_000, truncate_prompt_tokens=-1)
    error = rejected(c, " one" * 10_000, truncate_prompt_tokens=-1)
    assert "A text that is cut may have at most 16384 tokens" in error["message"]


def test_a_text_follows_the_prompt_that_the_request_names(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    prompts = {"query": "find: ", "none": "", "document": "text: "}
    sentence = {"prompts": prompts, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(sentence))
    c = InProcess(load_tokenizer(folder), scoring="vectors")
    cases: list[tuple[str | None, str]] = [(None, "text: "), *prompts.items()]
    for name, prompt in cases:
        embed(c, "hi", prompt_name=name)
        assert list(c.node.requests[-1].prompt) == c.encode(prompt + "hi")
    embed(c, [5, 6])
    assert list(c.node.requests[-1].prompt) == [5, 6]
    error = rejected(c, prompt_name="other")
    assert error["param"] == "prompt_name" and "'query', 'none'" in error["message"]
    assert rejected(c, [5], prompt_name="query")["param"] == "prompt_name"
    c.post("/v1/rerank", query="a", documents=["b"])
    pair = sorted(list(request.prompt) for request in c.node.requests[-2:])
    assert pair == sorted([c.encode("find: a"), c.encode("text: b")])
    c.post("/api/embed", model="tiny", input="hi")
    assert list(c.node.requests[-1].prompt) == c.encode("text: hi")


def test_many_inputs_keep_their_order(c: InProcess) -> None:
    prompts = [[5] * (1 + i % 7) for i in range(200)]
    data = embed(c, prompts)["data"]
    assert [item["embedding"] for item in data] == list(map(vector, prompts))


def test_invalid_inputs_are_rejected(c: InProcess) -> None:
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
        error = rejected(c, value)
        assert word in error["message"] and error["param"].startswith("input"), error
    for fields in (
        {"encoding_format": "bytes"},
        {"dimensions": 0},
        {"truncate_prompt_tokens": 0},
        {"prompt_name": "query"},
        {"embed_dtype": "float16"},
    ):
        assert rejected(c, **fields)["param"] == next(iter(fields))
    assert not c.node.requests
