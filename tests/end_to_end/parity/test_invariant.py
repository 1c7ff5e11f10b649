"""Invariant 1 through HTTP with real processes: it does not matter who computed the prompt."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CHUNK,
    CONTEXT,
    TestCluster,
    node_metric,
    until,
)
from tandem.tests.support.checkpoints.tiny_models import VOCAB
from tandem.tests.support.extent import selected

OUTPUT = 8
BORDERS = [
    1,
    2,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK,
    2 * BLOCK + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    2 * CHUNK + 1,
    300,
    CONTEXT - OUTPUT - 1,
    CONTEXT - OUTPUT,
]
# 3 layers, K and V, 2 heads of 16, 4 bytes
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two seeded choices": {"temperature": 1.0, "seed": 7, "n": 2},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3},
}


# Of each choice.
Drawn = list[tuple[list[int], list[float]]]


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB - 10) for _ in range(length)] for length in BORDERS]


def fields_of(variant: str) -> dict[str, Any]:
    fields = {"max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    return fields | VARIANTS[variant]


def tokens_and_logprobs(body: dict[str, Any]) -> Drawn:
    return [
        (choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in body["choices"]
    ]


@pytest.fixture(scope="package")
def alone(aggregated: TestCluster) -> Callable[[str, int], Drawn]:
    """The outputs of a node that prefills locally; each batch is sent once for all carriers."""

    @functools.cache
    def ask(variant: str, seed: int) -> Drawn:
        return tokens_and_logprobs(aggregated.complete(prompts(seed), **fields_of(variant)))

    return ask


# Sampling does not depend on how KV moves.
@pytest.mark.parametrize(
    ("disaggregated", "variant"),
    selected(
        [*(("shared_memory", name) for name in VARIANTS), ("tcp", "greedy")],
        full=[("tcp", name) for name in VARIANTS if name != "greedy"],
    ),
    indirect=["disaggregated"],
)
def test_prompts_at_every_border_give_the_same_tokens_and_logprobs(
    variant: str, alone: Callable[[str, int], Drawn], disaggregated: TestCluster
) -> None:
    fields = fields_of(variant)
    for number in selected([1], full=[2, 3]):
        seed = 1000 * list(VARIANTS).index(variant) + number
        batch, expected = prompts(seed), alone(variant, seed)
        first = tokens_and_logprobs(disaggregated.complete(batch, **fields))
        # Again, now that both nodes have the prefixes cached.
        second = tokens_and_logprobs(disaggregated.complete(batch, **fields))
        assert len(expected) == len(batch) * fields.get("n", 1)
        for (want, want_logprobs), *others in zip(expected, first, second, strict=True):
            for output, got_logprobs in others:
                assert output == want
                assert got_logprobs == pytest.approx(want_logprobs, abs=1e-4)


def test_the_prompts_really_went_through_the_prefill_node(
    disaggregated: TestCluster, request: pytest.FixtureRequest
) -> None:
    prompt = prompts(77)[-2]
    body = disaggregated.complete(prompt, max_tokens=1, temperature=0)
    assert body["tandem"]["remote_tokens"] == len(prompt) - 1
    assert body["tandem"]["prefill_nodes"]
    carrier = request.node.callspec.params["disaggregated"]
    for node in disaggregated.parts[1:]:
        series = f'tandem_data_plane_peers{{carrier="{carrier}",rank="0"}}'
        until(lambda node=node, name=series: node_metric(node, name) == 1, series)  # type: ignore[misc]


def test_only_the_missing_tokens_travel(disaggregated: TestCluster) -> None:
    nodes = disaggregated.parts[1:]
    prompt = prompts(88)[-1]

    def assert_travel(tokens: list[int], expected: int) -> None:
        """Both sides count the same bytes, once the transfer has been settled."""
        name = "tandem_transfer_bytes_total"
        before = [node_metric(node, name) for node in nodes]
        disaggregated.complete(tokens, max_tokens=1, temperature=0)
        for node, start in zip(nodes, before, strict=True):
            until(lambda: node_metric(node, name) > start, "the transfer to be counted")  # noqa: B023
            assert node_metric(node, name) - start == expected * BYTES_PER_TOKEN

    disaggregated.wait_idle(*nodes)
    assert_travel(prompt[:100], 99)
    # The longer prompt shares six full blocks with the first.
    assert_travel(prompt, len(prompt) - 1 - 96)


def test_stopping_at_a_string_is_the_same_streamed_or_not(disaggregated: TestCluster) -> None:
    prompt = prompts(99)[5]
    whole = disaggregated.complete(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = disaggregated.complete(
        prompt, max_tokens=12, temperature=0, ignore_eos=True, stop=[stop]
    )["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


def test_nothing_is_held_when_all_is_done(
    aggregated: TestCluster, disaggregated: TestCluster
) -> None:
    aggregated.wait_idle(*aggregated.parts[1:])
    disaggregated.wait_idle(*disaggregated.parts[1:])


def vectors(cluster: TestCluster, batch: list[list[int]]) -> list[list[float]]:
    status, body = cluster.post("/v1/embeddings", {"input": batch})
    assert status == 200, body
    return [item["embedding"] for item in body["data"]]


def test_prompts_have_the_same_vectors_together_and_apart(
    aggregated: TestCluster, disaggregated: TestCluster
) -> None:
    batch = prompts(55)
    expected = vectors(aggregated, batch)
    assert sum(value * value for value in expected[0]) == pytest.approx(1)
    for _ in range(2):  # the second time, prefixes are cached
        for vector, reference in zip(vectors(disaggregated, batch), expected, strict=True):
            assert vector == pytest.approx(reference, abs=1e-4)
