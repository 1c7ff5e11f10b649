"""Nodes that plan steps ahead, over a handoff: the tokens of one node that plans in turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.cluster import committed_transfers, running
from tandem.tests.support.checkpoints.tiny_models import VOCAB

AHEAD = "--async-scheduling=on"
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PENALISED = GREEDY | {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "stop": ["\x00"]}


@pytest.mark.parametrize("ranks", [2])
def test_prompts_prefilled_elsewhere_continue_as_in_turn(
    tmp_path: Path, tiny_model: str, ranks: int
) -> None:
    """Prompts in chunks, shared prefixes, and fewer blocks than all streams need at once."""
    draw = random.Random(ranks)
    common = [draw.randrange(VOCAB - 10) for _ in range(70)]
    batch = [common + [draw.randrange(VOCAB - 10) for _ in range(n)] for n in (1, 9, 64, 130, 200)]
    for name in ("in-turn", "ahead"):
        (tmp_path / name).mkdir()
    with running(tmp_path / "in-turn", tiny_model) as cluster:
        cluster.start_router()
        cluster.start_node("decode-node", "--async-scheduling=off")
        cluster.wait_nodes(decode=1, prefill=0)
        want = [cluster.complete(batch, **fields)["choices"] for fields in (GREEDY, PENALISED)]
    with running(tmp_path / "ahead", tiny_model) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(
            ("prefill-node", AHEAD, f"--tp={ranks}"),
            ("decode-node", AHEAD, f"--tp={ranks}", "--num-gpu-blocks-override=48"),
        )
        cluster.wait_nodes(decode=1, prefill=1)
        outputs = [cluster.complete(batch, **fields)["choices"] for fields in (GREEDY, PENALISED)]
        assert [[c["token_ids"] for c in choices] for choices in outputs] == [
            [c["token_ids"] for c in choices] for choices in want
        ]
        assert committed_transfers(decode) >= len(batch)
        cluster.wait_idle(prefill, decode)
