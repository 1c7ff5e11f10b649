"""Nodes that differ in what they need not agree on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from tandem.tests.end_to_end.cluster import TestCluster, node_metric, running
from tandem.tests.end_to_end.ensemble import Ensemble, side
from tandem.tests.tiny_models import VOCAB

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LENGTHS = (2, 7, 8, 9, 17, 31, 33, 63, 64, 65, 200, 400)
COMMITTED = 'tandem_transfers_total{outcome="committed"}'


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in lengths]


# Ranks and block size. With four ranks the model's two KV heads are held twice.
NODES = {"one": (1, 8), "two": (2, 64), "four": (4, 16)}
PAIRS = list(permutations(NODES, 2))


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Ensemble]:
    with running(tmp_path_factory.mktemp("trio"), tiny_model) as cluster:
        yield Ensemble(cluster, NODES)


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_numbers_of_ranks_and_block_sizes_may_differ(
    trio: Ensemble, aggregated: TestCluster, there: str, here: str
) -> None:
    # What no node has seen.
    batch = prompts(PAIRS.index((there, here)) + 100, LENGTHS)
    # The second half of each begins like the first, so that both prefix caches have a part in it.
    more = [tokens + end for tokens, end in zip(batch, prompts(1, (40,) * len(batch)), strict=True)]
    want = [c["token_ids"] for c in aggregated.complete(batch + more, **FIELDS)["choices"]]
    prefill, decode = trio.cast(there, here)
    before = node_metric(decode, COMMITTED)
    got = [
        choice["token_ids"]
        for part in (batch, more)
        for choice in trio.cluster.complete(part, **FIELDS)["choices"]
    ]
    assert got == want
    assert node_metric(decode, COMMITTED) - before == 2 * len(batch)
    trio.cluster.wait_idle(prefill, decode)


@pytest.mark.parametrize(
    ("there", "here", "tolerance"),
    [
        ((1, 8, "--dtype=bfloat16"), (2, 32, "--kv-cache-dtype=float16"), 0.1),
        ((1, 64, "--kv-cache-dtype=float32"), (2, 16, "--kv-cache-dtype=fp8"), 0.5),
        ((2, 32, "--kv-cache-dtype=fp8_e4m3"), (1, 8, "--kv-cache-dtype=float32"), 0.5),
        ((1, 16, "--kv-cache-dtype=fp8"), (1, 64, "--kv-cache-dtype=fp8"), 1e-2),
    ],
    ids=str,
)
def test_formats_may_differ(
    tmp_path: Path,
    tiny_model: str,
    there: tuple[int, int, str],
    here: tuple[int, int, str],
    tolerance: float,
) -> None:
    """The KV arrives in the decode node's format. What comes out differs by no more than the
    rounding of the coarser format does, in the log-probability of the first token; where the
    formats are the same, no token does."""
    batch = prompts(5, (17, 65, 200))
    fields = {**FIELDS, "logprobs": 1}
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        decode = cluster.start_node(*side("decode-node", *here), "--no-enable-prefix-caching")
        cluster.wait_nodes(decode=1, prefill=0)
        want = cluster.complete(batch, **fields)["choices"]
        prefill = cluster.start_node(*side("prefill-node", *there))
        cluster.wait_nodes(decode=1, prefill=1)
        got = cluster.complete(batch, **fields)["choices"]
        for one, other in zip(want, got, strict=True):
            first, second = (c["logprobs"]["token_logprobs"][0] for c in (one, other))
            assert first == pytest.approx(second, abs=tolerance)
            assert there[2] != here[2] or one["token_ids"] == other["token_ids"]
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        assert node_metric(decode, COMMITTED) == len(batch)
        cluster.wait_idle(prefill, decode)
