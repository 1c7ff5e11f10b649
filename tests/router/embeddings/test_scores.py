"""POST /v1/score and /v1/rerank, by vectors and by pairs that a model reads together."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
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
    until,
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
    response = await post(vectors, path, model="tiny", text_1=TEXTS[0], text_2=TEXTS[1:3])
    expected = [cosine(vectors, TEXTS[0], text) for text in TEXTS[1:3]]
    assert [item["score"] for item in response["data"]] == pytest.approx(expected)
    assert [item["index"] for item in response["data"]] == [0, 1]
    assert (response["object"], response["data"][0]["object"]) == ("list", "score")
    tokens = sum(len(vectors.encode(text)) for text in TEXTS[:3])
    assert response["usage"] == {
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
    response = await post(pairs, "/score", **dict(zip(names, (one, other), strict=True)))
    prompts = [pair_of(pairs, *pair) for pair in zip(one, other, strict=True)]
    assert [item["score"] for item in response["data"]] == [score(prompt) for prompt in prompts]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_a_cross_encoder(path: str, pairs: Cluster) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    response = await post(pairs, path, query="hello", documents=documents, top_n=3)
    prompts = [pair_of(pairs, "hello", text) for text in TEXTS]
    scores = [score(prompt) for prompt in prompts]
    best = sorted(range(len(TEXTS)), key=lambda i: -scores[i])[:3]
    assert response["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": TEXTS[i]}} for i in best
    ]
    assert response["usage"]["total_tokens"] == sum(map(len, prompts))
    for request in pairs.node.requests:
        assert request.embed.score and request.embed.normalize and not request.embed.pooling
        assert request.embed.second_text == 2 + len(pairs.encode("hello")) - 2
    await post(pairs, path, query="hello", documents=["a"], use_activation=False)
    assert not pairs.node.requests[-1].embed.normalize


async def test_documents_are_returned_on_request(vectors: Cluster) -> None:
    response = await post(
        vectors, "/rerank", query="hi", documents=TEXTS[:3], return_documents=False
    )
    assert all(item.keys() == {"index", "relevance_score"} for item in response["results"])
    assert len(response["results"]) == 3
    scores = [item["relevance_score"] for item in response["results"]]
    assert scores == sorted((cosine(vectors, "hi", text) for text in TEXTS[:3]), reverse=True)


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


async def test_texts_of_a_model_of_vectors_are_cut_one_by_one(vectors: Cluster) -> None:
    long = "one two three " * CONTEXT
    for tokens, length in ((-1, CONTEXT), (20, 20)):
        options = {"truncate_prompt_tokens": tokens}
        await post(vectors, "/rerank", query=long, documents=[long], **options)
        cut = [len(request.prompt) for request in vectors.node.requests[-2:]]
        assert cut == [length, length]


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
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": [{"text": "", "image": ""}]}, "documents[0].image"),
        ("/rerank", {"query": {"content": [{"image_url": {}}]}, "documents": ["b"]},
         "query.content[0].image_url"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": "2"}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "Find"}, "instruction"),
        ("/score", {**PAIR, "instruction": 5}, "instruction"),
        ("/score", {**PAIR, "truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ("/score", {**PAIR, "use_activation": "no"}, "use_activation"),
        ("/classify", {"input": "a"}, "model"),
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


async def test_a_model_that_has_no_chats_says_what_it_is_for(tmp_path: Path) -> None:
    config = make_model(tmp_path / "model") / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    async with cluster(tmp_path, nodes=0) as c:
        await c.add(scoring="pair")
        body = {"messages": [{"role": "user", "content": "hi"}]}
        response = (await c.client.post("/v1/chat/completions", json=body)).json()
    assert "has no chat template, as it is not for chats; use /v1/rerank" in json.dumps(response)


TEMPLATE = (
    "{% for m in messages %}{{ 'do ' if m.role == 'system' else '' }}"
    "{% if m.role in ('system', 'query', 'document') %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{{ unit | default('') }}"
)


def encoded(c: Cluster, text: str) -> list[int]:
    raw = Tokenizer.from_file(str(c.model / "tokenizer.json"))
    ids: list[int] = raw.encode(text).ids
    return ids


async def test_a_template_of_pairs_is_that_of_a_reranker(tmp_path: Path) -> None:
    """From the operator, as in vLLM, with variables; an instruction comes first."""
    options: dict[str, Any] = {"chat_template": TEMPLATE}
    options |= {"default_chat_template_kwargs": '{"unit": "one"}'}
    async with cluster(tmp_path, nodes=0, **options) as c:
        await c.add(scoring="pair")
        await post(c, "/rerank", query="hello", documents=["world", "<|end|>"])
        prompts = [list(request.prompt) for request in c.node.requests]
        assert encoded(c, "hello<|end|>world<|end|>one") in prompts
        # A document's special tokens are plain text.
        end = encoded(c, "<|end|>")
        assert sorted(prompt.count(end[0]) for prompt in prompts) == [2, 2]
        await post(c, "/score", **PAIR, instruction="find")
        assert list(c.node.requests[-1].prompt) == encoded(c, "do find<|end|>a<|end|>b<|end|>one")
        assert c.node.requests[-1].embed.second_text == 0


async def test_a_reranker_by_name_has_the_template_of_its_card(tmp_path: Path) -> None:
    """From the node's files, which a remote router fetches."""
    async with cluster(tmp_path, nodes=0) as c:
        named = tmp_path / "Qwen3-Reranker-0.6B"
        named.symlink_to(c.model)
        c.model = named
        await c.add(scoring="pair")
        await post(c, "/score", **PAIR)
        text = c.router.registry.model().tokenizer.decode(c.node.requests[-1].prompt)
        assert "<Query>: a" in text and "<Document>: b" in text
        assert text.endswith("<think>\n\n</think>\n\n")


async def test_more_documents_than_there_are_is_all_of_them(pairs: Cluster) -> None:
    response = await post(pairs, "/rerank", query="hello", documents=TEXTS, top_n=99)
    assert len(response["results"]) == len(TEXTS)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_texts_get_the_label_of_their_best_score(path: str, tmp_path: Path) -> None:
    labels = ("no", "maybe", "yes")
    async with cluster(tmp_path, nodes=0) as c:
        await c.add(scoring="labels", labels=labels)
        inputs = [c.encode(text) for text in TEXTS[:3]]
        labelled = await post(c, path, input=TEXTS[:3], model="tiny")
        for index, (prompt, item) in enumerate(zip(inputs, labelled["data"], strict=True)):
            probs = [score(prompt[label:]) for label in range(3)]
            best = labels[probs.index(max(probs))]
            assert item == {"index": index, "label": best, "probs": probs, "num_classes": 3}
        assert labelled["object"] == "list" and labelled["id"].startswith("classify-")
        assert labelled["usage"]["total_tokens"] == sum(map(len, inputs))
        assert await post(c, path, input=inputs, use_activation=False)
        assert {request.embed.normalize for request in c.node.requests[-3:]} == {False}
        for body, param in (
            ({"input": []}, "input"),
            ({"input": ["a", ""]}, "input"),
            ({"input": [[1], "a"]}, "input"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "one two three " * CONTEXT}, "input"),
            ({"input": "a", "messages": []}, "messages"),
            ({}, "input"),
        ):
            response = await c.client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        for route, fields in (("/score", PAIR), ("/rerank", {"query": "a", "documents": ["b"]})):
            error = (await c.client.post(route, json=fields)).json()["error"]
            assert (error["code"], error["param"]) == ("model_cannot_score", "model")
            assert "has a classifier of 3 labels" in error["message"]


async def test_a_full_node_refuses_the_whole_request(pairs: Cluster) -> None:
    """It ends the pairs that the node already runs."""

    async def full(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if len(pairs.node.requests) > 20:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield admitted()
        await asyncio.sleep(3600)

    pairs.node.script = full
    response = await pairs.client.post("/rerank", json={"query": "a", "documents": ["b"] * 50})
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "overloaded"
    await until(lambda: not pairs.node.active)


async def test_a_client_that_leaves_ends_all_pairs(pairs: Cluster) -> None:
    async def stuck(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        await asyncio.sleep(3600)

    pairs.node.script = stuck
    body = {"query": "a", "documents": ["b"] * 50}
    task = asyncio.create_task(pairs.client.post("/rerank", json=body))
    await until(lambda: pairs.node.active > 0)
    task.cancel()
    await until(lambda: not pairs.node.active and not pairs.router.metrics.requests.total())
    pairs.node.script = None
    assert len((await post(pairs, "/rerank", **body))["results"]) == 50


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
        response = await held_briefly(lambda: httpx.post(f"{c.url}/rerank", json=many, timeout=30))
    assert {item["relevance_score"] for item in response.json()["results"]} == {2048.0}
