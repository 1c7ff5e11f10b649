"""A model with sliding windows in some layers, over nodes that send no more than those show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import BLOCK, node_metric, running, until
from tandem.tests.support.checkpoints import tiny_models

WINDOW, OUTPUT = 24, 8
# K and V, 2 heads of 16, 4 bytes.
CELL = 2 * 2 * 16 * 4
BYTES = "tandem_transfer_bytes_total"


def greedy(reference: Any, tokens: list[int]) -> list[int]:
    """The greedy tokens of transformers."""
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([tokens]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
        )
    return list(output[0, len(tokens) :].tolist())


def cells(end: int, resume: int) -> int:
    """Cells of a full layer and two with a window, for a node that holds nothing."""
    return end + 2 * (end - max(0, resume - WINDOW + 1))


def test_windows_travel_alone_and_a_branch_off_a_received_prompt_is_right(tmp_path: Path) -> None:
    model = tmp_path / "windowed"
    tiny_models.build(
        "qwen3", model, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = prompt(1, 300)
    # Prompt and number of choices; each branches off one that was received before.
    requests = [
        (base, 1),
        (base[:150] + prompt(2, 30), 3),
        (base[:290] + prompt(3, 9), 1),
        (base + prompt(4, 40), 3),
        *((prompt(5, WINDOW + more), 1) for more in (-1, 0, 1, 2)),
        (prompt(5, WINDOW + 60), 1),
    ]
    with running(tmp_path, str(model)) as cluster:
        cluster.start_router()
        prefill, decode = cluster.start_nodes(("prefill-node", "--tp=2"), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        for tokens, n in requests:
            before = node_metric(decode, BYTES)
            body = cluster.complete(
                tokens,
                n=n,
                max_tokens=OUTPUT,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert [c["token_ids"] for c in body["choices"]] == [greedy(reference, tokens)] * n
            cached = len(tokens) - 1 - body["tandem"]["remote_tokens"]
            assert not cached or tokens[0] != base[0]
            end = len(tokens) - 1
            if not cached:
                resume = end if n == 1 else end // BLOCK * BLOCK
                moved = before + cells(end, resume) * CELL
                until(lambda: node_metric(decode, BYTES) == moved, str(tokens))  # noqa: B023
        cluster.wait_idle(prefill, decode)
        assert node_metric(decode, 'tandem_transfers_total{outcome="committed"}') == len(requests)
