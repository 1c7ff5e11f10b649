"""POST /v1/score and /v1/rerank, by vectors and by pairs that a model reads together."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, processors

from tandem.proto import tandem_pb2 as pb
from tandem.router.embeddings.score_request import NAMES
from tandem.tests.router.support import (
    CONTEXT,
    Cluster,
    admitted,
    cluster,
    finished,
    held_briefly,
    make_model,
    score,
    usage,
    vector,
)

PAIR = {"text_1": "a", "text_2": "b"}
TEXTS = ["hello world", "one", "the quick brown fox", ""]


@pytest.fixture
async def vectors(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, nodes=0) as running:
        await running.add(scoring="vectors")
        yield running


@pytest.fixture
async def pairs(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A model whose tokenizer numbers the texts of a pair, as BERT's does."""
    folder = make_model(tmp_path / "model")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        pair="<|start|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|end|>", 0), ("<|start|>", 1)],
    )
    raw.save(str(folder / "tokenizer.json"))
    async with cluster(tmp_path, nodes=0) as running:
        await running.add(scoring="pair")
        yield running


def pair_of(c: Cluster, first: str, second: str) -> list[int]:
    raw = Tokenizer.from_file(str(c.model / "tokenizer.json"))
    ids: list[int] = raw.encode(first, second).ids
    return ids


def cosine(c: Cluster, one: str, other: str) -> float:
    both = [vector(c.encode(text)) for text in (one, other)]
    return sum(a * b for a, b in zip(*both, strict=True))


async def post(c: Cluster, path: str, **body: Any) -> Any:
    response = await c.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_of_an_embedding_model_are_products_of_its_vectors(
    path: str, vectors: Cluster
) -> None:
    answer = await post(vectors, path, model="tiny", text_1=TEXTS[0], text_2=TEXTS[1:3])
    wanted = [cosine(vectors, TEXTS[0], text) for text in TEXTS[1:3]]
    assert [item["score"] for item in answer["data"]] == pytest.approx(wanted)
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert (answer["object"], answer["data"][0]["object"]) == ("list", "score")
    tokens = sum(len(vectors.encode(text)) for text in TEXTS[:3])
    assert answer["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
    }
    assert all(request.embed.normalize for request in vectors.node.requests)


@pytest.mark.parametrize("names", NAMES)
async def test_texts_of_a_score_have_any_of_their_names(
    names: tuple[str, str], pairs: Cluster
) -> None:
    one, other = ["hello", "one"], ["two three", "lazy dog"]
    answer = await post(pairs, "/score", **dict(zip(names, (one, other), strict=True)))
    prompts = [pair_of(pairs, *pair) for pair in zip(one, other, strict=True)]
    assert [item["score"] for item in answer["data"]] == [score(prompt) for prompt in prompts]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_a_cross_encoder(path: str, pairs: Cluster) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    answer = await post(pairs, path, query="hello", documents=documents, top_n=3)
    prompts = [pair_of(pairs, "hello", text) for text in TEXTS]
    scores = [score(prompt) for prompt in prompts]
    best = sorted(range(len(TEXTS)), key=lambda i: -scores[i])[:3]
    assert answer["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": TEXTS[i]}} for i in best
    ]
    assert answer["usage"]["total_tokens"] == sum(map(len, prompts))
    for request in pairs.node.requests:
        assert request.embed.score and request.embed.normalize and not request.embed.pooling
        assert request.embed.second_text == 2 + len(pairs.encode("hello")) - 2
    await post(pairs, path, query="hello", documents=["a"], use_activation=False)
    assert not pairs.node.requests[-1].embed.normalize


async def test_documents_are_returned_if_they_are_wanted(vectors: Cluster) -> None:
    answer = await post(vectors, "/rerank", query="hi", documents=TEXTS[:3], return_documents=False)
    assert all(item.keys() == {"index", "relevance_score"} for item in answer["results"])
    assert len(answer["results"]) == 3
    found = [item["relevance_score"] for item in answer["results"]]
    assert found == sorted((cosine(vectors, "hi", text) for text in TEXTS[:3]), reverse=True)


async def test_pairs_are_cut_as_the_request_says(pairs: Cluster) -> None:
    long = "one two three " * CONTEXT
    error = (await pairs.client.post("/score", json={"text_1": "hi", "text_2": long})).json()
    assert error["error"]["code"] == "context_length_exceeded"
    await post(pairs, "/score", text_1="hi", text_2=long, truncate_prompt_tokens=20)
    [request] = pairs.node.requests
    raw = Tokenizer.from_file(str(pairs.model / "tokenizer.json"))
    raw.enable_truncation(20)
    assert list(request.prompt) == raw.encode("hi", long).ids
    await post(pairs, "/score", text_1="hi", text_2=long, truncate_prompt_tokens=-1)
    assert len(pairs.node.requests[-1].prompt) == CONTEXT


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", 5]}, "text_2[1]"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/score", {**PAIR, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
    ],
)  # fmt: skip
async def test_invalid_bodies_are_rejected(
    path: str, body: dict[str, Any], param: str, vectors: Cluster
) -> None:
    response = await vectors.client.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param, json.dumps(error)
    assert not vectors.node.requests


async def test_a_model_that_generates_text_scores_none(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        response = await c.client.post("/score", json=PAIR)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_cannot_score", "model")
        assert "'tiny' does not score texts" in error["message"]
    async with cluster(tmp_path, pooling="mean") as c:
        await post(c, "/score", **PAIR)
        assert {request.embed.pooling for request in c.node.requests} == {"mean"}


async def test_older_nodes_get_no_pair(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        await c.add(scoring="pair", capabilities=frozenset({"embeddings"}))
        response = await c.client.post("/score", json=PAIR)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "capability_unavailable"


async def test_products_of_many_vectors_do_not_hold_the_loop(tmp_path: Path) -> None:
    many = {"query": "a", "documents": ["b"] * 200}
    packed = struct.pack("<8192f", *[0.5] * 8192)

    async def wide(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        yield usage(request)
        yield pb.GenerateEvent(embedding=pb.Embedding(values=packed))
        yield finished(0)

    async with cluster(tmp_path, pooling="last") as c:
        c.node.script = wide
        answer = await held_briefly(lambda: httpx.post(f"{c.url}/rerank", json=many, timeout=30))
    assert {item["relevance_score"] for item in answer.json()["results"]} == {2048.0}
