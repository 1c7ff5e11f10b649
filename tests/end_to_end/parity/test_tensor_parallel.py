"""Two ranks on each side: every rank's heads travel to their twin."""

from __future__ import annotations

import random
from pathlib import Path

from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    committed_transfers,
    node_metric,
    running,
    until,
)
from tandem.tests.support.checkpoints.tiny_models import VOCAB


def test_a_pair_of_two_rank_nodes_gives_the_same_tokens(
    tmp_path: Path, tiny_model: str, aggregated: TestCluster
) -> None:
    draw = random.Random(11)
    batch = [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in (17, 64, 65, 200, 400)]
    fields = {
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    want = [c["token_ids"] for c in aggregated.complete(batch, **fields)["choices"]]
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        ranks = "--tensor-parallel-size=2"
        prefill, decode = cluster.start_nodes(("prefill-node", ranks), ("decode-node", ranks))
        cluster.wait_nodes(decode=1, prefill=1)
        _check_canary(cluster, prefill, decode)
        outputs = [c["token_ids"] for c in cluster.complete(batch, **fields)["choices"]]
        assert outputs == want
        assert committed_transfers(decode) == 1 + len(batch)
        cluster.wait_idle(prefill, decode)


def _check_canary(cluster: TestCluster, prefill: Part, decode: Part) -> None:
    """The first request brings it; it leaves nothing in a cache and counts as no transfer."""
    # Less than a block: only the canary could fill one.
    cluster.complete([1, 2, 3], max_tokens=1, temperature=0)
    cluster.wait_idle(prefill, decode)
    assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
    assert committed_transfers(decode) == 1
    assert node_metric(prefill, 'tandem_transfers_total{outcome="done"}') == 1
    for node, direction in ((prefill, "sent"), (decode, "received")):
        assert node_metric(node, 'tandem_kv_blocks{state="cached"}') == 0
        moved = f'tandem_data_plane_bytes_total{{direction="{direction}",rank="1"}}'
        # 30 tokens of the canary and 2 of the prompt: 3 layers, K and V, 1 head of 16, 4 bytes.
        until(lambda: node_metric(node, moved) == 32 * 3 * 2 * 16 * 4, moved)  # noqa: B023
