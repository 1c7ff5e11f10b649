"""Nodes that differ in what they need not agree on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tandem.tests.end_to_end.cluster import TestCluster, node_metric, running
from tandem.tests.tiny_models import VOCAB

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize(("there", "here"), [(8, 32), (64, 16), (16, 8)])
def test_block_sizes_may_differ(
    tmp_path: Path, tiny_model: str, aggregated: TestCluster, there: int, here: int
) -> None:
    draw = random.Random(there)
    lengths = (2, 7, 8, 9, 31, 33, 63, 65, 200, 400)
    batch = [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in lengths]
    # The second half of each begins like the first, so that both prefix caches have a part in it.
    batch += [tokens + [draw.randrange(VOCAB - 10) for _ in range(40)] for tokens in batch]
    want = [c["token_ids"] for c in aggregated.complete(batch, **FIELDS)["choices"]]
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(
            ("prefill-node", f"--block-size={there}"), ("decode-node", f"--block-size={here}")
        )
        cluster.wait_nodes(decode=1, prefill=1)
        half = len(lengths)
        got = [
            choice["token_ids"]
            for part in (batch[:half], batch[half:])
            for choice in cluster.complete(part, **FIELDS)["choices"]
        ]
        assert got == want
        assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == len(batch)
        cluster.wait_idle(prefill, decode)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_numbers_of_ranks_may_differ(
    tmp_path: Path, tiny_model: str, aggregated: TestCluster, there: int, here: int
) -> None:
    """With four ranks the model's two KV heads are held twice."""
    draw = random.Random(10 * there + here)
    batch = [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in (2, 17, 64, 65, 200)]
    want = [c["token_ids"] for c in aggregated.complete(batch, **FIELDS)["choices"]]
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(
            ("prefill-node", f"--tensor-parallel-size={there}"),
            ("decode-node", f"--tensor-parallel-size={here}"),
        )
        cluster.wait_nodes(decode=1, prefill=1)
        got = [c["token_ids"] for c in cluster.complete(batch, **FIELDS)["choices"]]
        assert got == want
        assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == len(batch)
        cluster.wait_idle(prefill, decode)


@pytest.mark.parametrize(
    ("there", "here"), list(itertools.permutations(["float32", "float16", "bfloat16"], 2))
)
def test_formats_may_differ(tmp_path: Path, tiny_model: str, there: str, here: str) -> None:
    """The KV arrives in the decode node's format. What comes out differs by no more than the
    rounding of the coarser format does: the log-probability of the first token by a tenth."""
    draw = random.Random(5)
    batch = [[draw.randrange(VOCAB - 10) for _ in range(n)] for n in (17, 65, 200)]
    fields = {**FIELDS, "max_tokens": 1, "logprobs": 1}
    with running(tmp_path, tiny_model) as cluster:
        cluster.start_router()
        (alone,) = cluster.start_nodes(("decode-node", f"--dtype={here}"))
        cluster.wait_nodes(decode=1, prefill=0)
        want = [c["logprobs"] for c in cluster.complete(batch, **fields)["choices"]]
        alone.process.terminate()
        cluster.wait_nodes(decode=0, prefill=0)
        prefill, decode = cluster.start_nodes(
            ("prefill-node", f"--dtype={there}"), ("decode-node", f"--dtype={here}")
        )
        cluster.wait_nodes(decode=1, prefill=1)
        got = [c["logprobs"] for c in cluster.complete(batch, **fields)["choices"]]
        for one, other in zip(want, got, strict=True):
            assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=0.1)
        assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == len(batch)
        cluster.wait_idle(prefill, decode)
