"""A prefill node and a decode node on one GPU, between which KV never leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import node_metric, running
from tandem.tests.support.emulation import EMULATED

HERE = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HERE and not EMULATED, reason="no CUDA device")

FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LENGTHS = (2, 17, 64, 400)
ON_GPU = (
    *(f"--device={'cuda' if HERE else 'cpu'}", "--nodes-per-device=2"),
    "--num-gpu-blocks-override=256",
)
CARRIER = "cuda_ipc" if HERE else "shared_memory"


def test_what_was_prefilled_elsewhere_on_the_gpu_is_continued_alike(
    tmp_path: Path, tiny_model: str
) -> None:
    batch = [prompt(length, length) for length in LENGTHS]
    outputs = []
    for folder, kinds in (("alone", ("decode-node",)), ("pair", ("prefill-node", "decode-node"))):
        (tmp_path / folder).mkdir()
        with running(tmp_path / folder, tiny_model) as cluster:
            cluster.start_router()
            carrier = f"--carrier={CARRIER if len(kinds) == 2 else 'auto'}"
            nodes = cluster.start_nodes(*((kind, *ON_GPU, carrier) for kind in kinds))
            cluster.wait_nodes(decode=1, prefill=len(kinds) - 1)
            choices = cluster.complete(batch, **FIELDS)["choices"]
            outputs.append([choice["token_ids"] for choice in choices])
            if len(kinds) == 2:
                committed = f'tandem_transfers_total{{carrier="{CARRIER}",outcome="committed"}}'
                assert node_metric(nodes[1], committed) == len(batch)
                cluster.wait_idle(*nodes)
    assert outputs[0] == outputs[1]
