"""Models whose layers keep KV of different shapes, over nodes with different ranks and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    TestCluster,
    committed_transfers,
    node_metric,
    running,
    until,
)
from tandem.tests.end_to_end.support.ensemble import Ensemble
from tandem.tests.support.checkpoints import mixed_kv
from tandem.tests.support.extent import selected

OUTPUT = 8
BYTES = "tandem_transfer_bytes_total"
# Values of a token in all layers, on both of two ranks or on one. With two ranks, a layer with one
# head and a latent are on both.
VALUES = {
    "shapes": {1: 2 * (32 + 32 + 32 + 32), 2: 2 * (32 + 64 + 32 + 32)},
    "latent_and_grouped": {
        1: (48 + 8) + 2 * 64 + (24 + 8) + 2 * 32,
        2: 2 * (48 + 8) + 2 * 64 + 2 * (24 + 8) + 2 * 64,
    },
}


@dataclass
class MixedPair:
    """Two nodes of a model, and the model as transformers computes it."""

    name: str
    nodes: Ensemble
    reference: mixed_kv.Reference


@pytest.fixture(scope="module", params=mixed_kv.MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MixedPair]:
    folder = tmp_path_factory.mktemp("mixed")
    reference = mixed_kv.Reference(request.param)
    reference.save(folder / "model")
    with running(folder, str(folder / "model")) as cluster:
        cluster.prelude = mixed_kv.PRELUDE
        kinds = {"one": (1, 8), "two": (2, 32)}
        yield MixedPair(request.param, Ensemble(cluster, kinds, [("one", "two")]), reference)


def outputs(cluster: TestCluster, batch: list[list[int]]) -> list[list[int]]:
    body = cluster.complete(
        batch, max_tokens=OUTPUT, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return [choice["token_ids"] for choice in body["choices"]]


@pytest.mark.parametrize(("there", "here"), selected([("one", "two")], full=[("two", "one")]))
def test_ranks_and_block_sizes_may_differ(pair: MixedPair, there: str, here: str) -> None:
    """The canary passes, tokens are those of transformers, and each rank gets what it keeps."""
    ranks = pair.nodes.kinds[here][0]
    batch = [prompt(1000 * ranks + length, length) for length in (2, 9, 33, 65, 200)]
    prefill, decode = pair.nodes.cast(there, here)
    committed = committed_transfers(decode)
    byte_counts = [node_metric(node, BYTES) for node in (prefill, decode)]
    expected = [pair.reference.greedy(tokens, OUTPUT) for tokens in batch]
    assert outputs(pair.nodes.cluster, batch) == expected
    assert committed_transfers(decode) - committed == len(batch)
    moved = 4 * VALUES[pair.name][ranks] * sum(len(tokens) - 1 for tokens in batch)
    for node, before in zip((prefill, decode), byte_counts, strict=True):
        until(lambda n=node, b=before: node_metric(n, BYTES) == b + moved, "the bytes of the KV")  # type: ignore[misc]
    pair.nodes.cluster.wait_idle(prefill, decode)
