"""Nodes with other numbers of ranks and other block sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, permutations

import pytest

from tandem.tests.end_to_end.support.cluster import TestCluster, committed_transfers, running
from tandem.tests.end_to_end.support.ensemble import Ensemble
from tandem.tests.support.checkpoints.tiny_models import VOCAB
from tandem.tests.support.extent import selected

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LENGTHS = (2, 7, 8, 9, 17, 31, 33, 63, 64, 65, 200, 400)
# Ranks and block size. With four ranks the model's two KV heads are held twice.
NODES = {"one": (1, 8), "two": (2, 64), "four": (4, 16)}
PAIRS = list(permutations(NODES, 2))
SHORT = [("one", "four"), ("four", "two"), ("two", "one")]


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Ensemble]:
    with running(tmp_path_factory.mktemp("trio"), tiny_model) as cluster:
        yield Ensemble(cluster, NODES, combinations(NODES, 2))


# Every node on either side, and the number of ranks both halved and quadrupled.
@pytest.mark.parametrize(
    ("there", "here"),
    selected(SHORT, full=[pair for pair in PAIRS if pair not in SHORT]),
)
def test_numbers_of_ranks_and_block_sizes_may_differ(
    trio: Ensemble, aggregated: TestCluster, there: str, here: str
) -> None:
    # What no node has seen.
    batch = prompts(PAIRS.index((there, here)) + 100, LENGTHS)
    # The second half of each begins like the first, so that both prefix caches have a part in it.
    more = [tokens + end for tokens, end in zip(batch, prompts(1, (40,) * len(batch)), strict=True)]
    want = [c["token_ids"] for c in aggregated.complete(batch + more, **FIELDS)["choices"]]
    prefill, decode = trio.cast(there, here)
    before = committed_transfers(decode)
    outputs = [
        choice["token_ids"]
        for part in (batch, more)
        for choice in trio.cluster.complete(part, **FIELDS)["choices"]
    ]
    assert outputs == want
    assert committed_transfers(decode) - before == 2 * len(batch)
    trio.cluster.wait_idle(prefill, decode)
