"""Two ranks on each side: every rank's heads travel to their twin."""

from __future__ import annotations

import random
from pathlib import Path

from tandem.tests.end_to_end.cluster import TestCluster, node_metric, running
from tandem.tests.tiny_models import VOCAB


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
        got = [c["token_ids"] for c in cluster.complete(batch, **fields)["choices"]]
        assert got == want
        assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == len(batch)
        cluster.wait_idle(prefill, decode)
