"""Pools that hold two long prompts at a time: more of them wait, or are prefilled elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.clients import greedy
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CONTEXT,
    TestCluster,
    node_metric,
    running,
)

CLIENTS = 16
DONE = 'tandem_transfers_total{outcome="done"}'
SMALL = f"--num-gpu-blocks-override={2 * CONTEXT // BLOCK + 4}"


@pytest.mark.parametrize("full", ["prefill", "decode", "both"])
def test_prompts_that_fill_a_pool_get_the_same_tokens(
    tmp_path: Path, tiny_model: str, aggregated: TestCluster, full: str
) -> None:
    want = [greedy(aggregated, 3000 + seed) for seed in range(CLIENTS)]
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(
            ("prefill-node", *([SMALL] if full != "decode" else [])),
            ("decode-node", *([SMALL] if full != "prefill" else [])),
        )
        cluster.wait_parts(prefill, decode)
        with ThreadPoolExecutor(CLIENTS) as pool:
            seeds = range(3000, 3000 + CLIENTS)
            assert list(pool.map(partial(greedy, cluster), seeds)) == want
        assert node_metric(prefill, DONE) > 0
        cluster.wait_idle(prefill, decode)
        assert greedy(cluster, 3000) == want[0]
