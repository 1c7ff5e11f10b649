"""KV of every family, packed by one runner and scattered by another: the next tokens are those of
transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.handoff.wire.layer_windows import first_tokens
from tandem.tests.support.runners import build_runner

from .test_kv_formats import logits
from .test_parity import BLOCK, STEPS, prompt_of, reference_run, scattered

LENGTH = 50


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_receiver_continues_with_the_tokens_of_transformers(folder: Path, ranks: int) -> None:
    """Block tables differ, layers with a window send no more than it, and the KV comes in as many
    parts as a sender with this number of ranks has."""
    sender, receiver = (
        build_runner(folder, dtype="float32", block_size=size, num_blocks=60)
        for size in (2 * BLOCK, BLOCK)
    )
    prompt, end = prompt_of(LENGTH), LENGTH - 1
    theirs, ours = [9, 2, 4, 30, 31, 7, 8], scattered(5, LENGTH + STEPS)
    logits(sender, prompt[:end], 0, theirs)
    firsts = first_tokens(receiver.model.spec, 0, end, end)
    for layer, first in enumerate(firsts):
        held = receiver.cache.layout[layer].heads
        parts = min(ranks, len(held))
        for part in range(parts):
            heads = range(part * len(held) // parts, (part + 1) * len(held) // parts)
            out = bytearray(receiver.cache.packed_bytes(layer, end - first, heads))
            sender.cache.pack(layer, theirs, first, end, out, heads)
            receiver.cache.scatter(layer, ours, first, end, out, heads)
    drawn, known = [], prompt
    for _ in range(STEPS):
        row = logits(receiver, known[-1:], len(known) - 1, ours)
        drawn.append(int(row.argmax()))
        known = [*known, drawn[-1]]
    assert drawn == reference_run(folder, LENGTH)[0]
