"""POST /v1/score and /v1/rerank, by vectors and by pairs that a model reads together."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer, processors

from tandem.proto import tandem_pb2 as pb
from tandem.router.embeddings.score_request import NAMES
from tandem.shared.text.tokenizer import Tokenizer as RouterTokenizer
from tandem.tests.router.in_process import InProcess, load_tokenizer, tiny
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


@cache
def numbering_pairs() -> tuple[Tokenizer, RouterTokenizer]:
    """A tokenizer that numbers the texts of a pair, as BERT's does, twice."""
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        raw = Tokenizer.from_file(str(model / "tokenizer.json"))
        raw.post_processor = processors.TemplateProcessing(
            single="<|start|> $A <|end|>",
            pair="<|start|> $A <|end|> $B:1 <|end|>:1",
            special_tokens=[("<|end|>", 0), ("<|start|>", 1)],
        )
        raw.save(str(model / "tokenizer.json"))
        return raw, load_tokenizer(model)


@pytest.fixture
def vectors() -> InProcess:
    return InProcess(scoring="vectors")


@pytest.fixture
def pairs() -> InProcess:
    return InProcess(numbering_pairs()[1], scoring="pair")


def pair_of(first: str, second: str) -> list[int]:
    return numbering_pairs()[0].encode(first, second).ids


def cosine(c: InProcess, one: str, other: str) -> float:
    both = [vector(c.encode(text)) for text in (one, other)]
    return sum(a * b for a, b in zip(*both, strict=True))


def post(c: InProcess, path: str, **body: Any) -> Any:
    response = c.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def test_scores_of_an_embedding_model_are_products_of_its_vectors(vectors: InProcess) -> None:
    response = post(vectors, "/v1/score", model="tiny", text_1=TEXTS[0], text_2=TEXTS[1:3])
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
def test_texts_of_a_score_have_any_of_their_names(names: tuple[str, str], pairs: InProcess) -> None:
    one, other = ["hello", "one"], ["two three", "lazy dog"]
    response = post(pairs, "/v1/score", **dict(zip(names, (one, other), strict=True)))
    prompts = [pair_of(*pair) for pair in zip(one, other, strict=True)]
    assert [item["score"] for item in response["data"]] == [score(prompt) for prompt in prompts]


def test_documents_are_ranked_by_a_cross_encoder(pairs: InProcess) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    response = post(pairs, "/v1/rerank", query="hello", documents=documents, top_n=3)
    prompts = [pair_of("hello", text) for text in TEXTS]
    scores = [score(prompt) for prompt in prompts]
    best = sorted(range(len(TEXTS)), key=lambda i: -scores[i])[:3]
    assert response["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": TEXTS[i]}} for i in best
    ]
    assert response["usage"]["total_tokens"] == sum(map(len, prompts))
    for request in pairs.node.requests:
        assert request.embed.score and request.embed.normalize and not request.embed.pooling
        assert request.embed.second_text == 2 + len(pairs.encode("hello"))
    post(pairs, "/v1/rerank", query="hello", documents=["a"], use_activation=False)
    assert not pairs.node.requests[-1].embed.normalize


def test_documents_are_returned_on_request(vectors: InProcess) -> None:
    response = post(vectors, "/v1/rerank", query="hi", documents=TEXTS[:3], return_documents=False)
    assert all(item.keys() == {"index", "relevance_score"} for item in response["results"])
    assert len(response["results"]) == 3
    scores = [item["relevance_score"] for item in response["results"]]
    assert scores == sorted((cosine(vectors, "hi", text) for text in TEXTS[:3]), reverse=True)


def test_pairs_are_cut_as_the_request_says(pairs: InProcess) -> None:
    long = "one two three " * CONTEXT
    error = pairs.post("/v1/score", text_1="hi", text_2=long).json()["error"]
    assert error["code"] == "context_length_exceeded"
    post(pairs, "/v1/score", text_1="hi", text_2=long, truncate_prompt_tokens=20)
    [request] = pairs.node.requests
    raw = Tokenizer.from_str(numbering_pairs()[0].to_str())
    raw.enable_truncation(20)
    assert list(request.prompt) == raw.encode("hi", long).ids
    post(pairs, "/v1/score", text_1="hi", text_2=long, truncate_prompt_tokens=-1)
    assert len(pairs.node.requests[-1].prompt) == CONTEXT


def test_texts_of_a_model_of_vectors_are_cut_one_by_one(vectors: InProcess) -> None:
    long = "one two three " * CONTEXT
    for tokens, length in ((-1, CONTEXT), (20, 20)):
        options = {"truncate_prompt_tokens": tokens}
        post(vectors, "/v1/rerank", query=long, documents=[long], **options)
        cut = [len(request.prompt) for request in vectors.node.requests[-2:]]
        assert cut == [length, length]


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/score", {}, "text_1"),
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
    ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", 5]}, "text_2[1]"),
    ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ("/v1/score", {**PAIR, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/score", {"text_1": "a", "text_2": ""}, "text_2"),
    ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a"}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
    ("/v1/rerank", {"query": "a", "documents": [{"text": "", "image": ""}]}, "documents[0].image"),
    ("/v1/rerank", {"query": {"content": [{"image_url": {}}]}, "documents": ["b"]},
     "query.content[0].image_url"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": "2"}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
    ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "Find"}, "instruction"),
    ("/v1/score", {**PAIR, "instruction": 5}, "instruction"),
    ("/v1/score", {**PAIR, "truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ("/v1/score", {**PAIR, "use_activation": "no"}, "use_activation"),
    ("/classify", {"input": "a"}, "model"),
)  # fmt: skip


def test_invalid_bodies_are_rejected(vectors: InProcess) -> None:
    for path, body, param in WRONG:
        response = vectors.post(path, **body)
        assert response.status_code == 400, body
        assert response.json()["error"]["param"] == param, response.text
    assert not vectors.node.requests


def test_chats_of_an_embedding_model_name_its_apis() -> None:
    response = InProcess(tiny(None), scoring="pair").chat()
    assert "has no chat template, as it is not for chats; use /v1/rerank" in response.text


TEMPLATE = (
    "{% for m in messages %}{{ 'do ' if m.role == 'system' else '' }}"
    "{% if m.role in ('system', 'query', 'document') %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{{ unit | default('') }}"
)


def test_a_template_of_pairs_is_that_of_a_reranker(tmp_path: Path) -> None:
    """Set by the operator, as users of vLLM do, with variables; an instruction stands before."""
    tokenizer = load_tokenizer(make_model(tmp_path), chat_template=TEMPLATE)
    variables = '{"unit": "one"}'
    c = InProcess(tokenizer, scoring="pair", default_chat_template_kwargs=variables)
    post(c, "/v1/rerank", query="hello", documents=["world", "<|end|>"])
    prompts = [list(request.prompt) for request in c.node.requests]
    assert c.encode("hello<|end|>world<|end|>one") in prompts
    # What a document says is text.
    assert sorted(prompt.count(0) for prompt in prompts) == [2, 2]
    post(c, "/v1/score", **PAIR, instruction="find")
    assert list(c.node.requests[-1].prompt) == c.encode("do find<|end|>a<|end|>b<|end|>one")
    assert c.node.requests[-1].embed.second_text == 0


async def test_a_reranker_by_name_has_the_template_of_its_card(tmp_path: Path) -> None:
    """Of the node's files, which a router far away gets from the node."""
    async with cluster(tmp_path, nodes=0) as c:
        model_folder = tmp_path / "Qwen3-Reranker-0.6B"
        model_folder.symlink_to(c.model)
        c.model = model_folder
        await c.add(scoring="pair")
        response = await c.client.post("/score", json=PAIR)
        assert response.status_code == 200, response.text
        text = c.router.registry.model().tokenizer.decode(c.node.requests[-1].prompt)
        assert "<Query>: a" in text and "<Document>: b" in text
        assert text.endswith("<think>\n\n</think>\n\n")


def test_more_documents_than_there_are_is_all_of_them(pairs: InProcess) -> None:
    response = post(pairs, "/v1/rerank", query="hello", documents=TEXTS, top_n=99)
    assert len(response["results"]) == len(TEXTS)


def test_texts_get_the_label_of_their_best_score() -> None:
    labels = ("no", "maybe", "yes")
    c = InProcess(scoring="labels", labels=labels)
    inputs = [c.encode(text) for text in TEXTS[:3]]
    response = post(c, "/classify", input=TEXTS[:3], model="tiny")
    for index, (prompt, item) in enumerate(zip(inputs, response["data"], strict=True)):
        probs = [score(prompt[label:]) for label in range(3)]
        best = labels[probs.index(max(probs))]
        assert item == {"index": index, "label": best, "probs": probs, "num_classes": 3}
    assert response["object"] == "list" and response["id"].startswith("classify-")
    assert response["usage"]["total_tokens"] == sum(map(len, inputs))
    assert post(c, "/classify", input=inputs, use_activation=False)
    assert {request.embed.normalize for request in c.node.requests[-3:]} == {False}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "one two three " * CONTEXT}, "input"),
        ({"input": "a", "messages": []}, "messages"),
        ({}, "input"),
    )
    for body, param in wrong:
        rejected = c.post("/classify", **body)
        assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, param), body
    for path, body in (("/v1/score", PAIR), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        error = c.post(path, **body).json()["error"]
        assert (error["code"], error["param"]) == ("model_cannot_score", "model")
        assert "has a classifier of 3 labels" in error["message"]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, nodes=0) as running:
        await running.add(scoring="pair")
        yield running


async def test_a_full_node_refuses_the_whole_request(served: Cluster) -> None:
    """Some of whose pairs it has, which it ends."""

    async def full(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if len(served.node.requests) > 20:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield admitted()
        await asyncio.sleep(3600)

    served.node.script = full
    response = await served.client.post("/rerank", json={"query": "a", "documents": ["b"] * 50})
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "overloaded"
    await until(lambda: not served.node.active)


async def test_a_client_that_leaves_ends_all_pairs(served: Cluster) -> None:
    async def stuck(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield admitted()
        await asyncio.sleep(3600)

    served.node.script = stuck
    body = {"query": "a", "documents": ["b"] * 50}
    task = asyncio.create_task(served.client.post("/rerank", json=body))
    await until(lambda: served.node.active > 0)
    task.cancel()
    await until(lambda: not served.node.active and not served.router.metrics.requests.total())
    served.node.script = None
    response = await served.client.post("/rerank", json=body)
    assert len(response.json()["results"]) == 50


def test_a_generative_model_refuses_scores() -> None:
    response = InProcess().post("/v1/score", **PAIR)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_cannot_score", "model")
    assert "'tiny' does not score texts" in error["message"]
    c = InProcess(pooling="mean")
    post(c, "/v1/score", **PAIR)
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
