"""A decode node that received only a layer's window computes the same; with one token less it would
not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.handoff.wire.layer_windows import first_tokens
from tandem.shared.models.spec import AttentionSpec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.packed_kv import packed_bytes
from tandem.tests.support.runners import build_runner

from .test_kv_formats import logits
from .test_parity import prompt_of

WINDOW, BLOCK = 24, 4
HERE, THERE = list(range(20)), [2 * (i % 20) + i // 20 for i in range(20)]
# All layers with a window, and a full one before two with it.
PATTERNS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}


@pytest.fixture(params=PATTERNS)
def windowed(request: pytest.FixtureRequest, model_root: Path) -> Path:
    folder = model_root / f"windowed-{request.param}"
    if not folder.exists():
        tiny_models.build(request.param, folder, **PATTERNS[request.param])
    return folder


def runner_of(folder: Path) -> ModelRunner:
    return build_runner(folder, dtype="float32", block_size=BLOCK, num_blocks=40)


def hand_over(
    sender: ModelRunner, receiver: ModelRunner, firsts: tuple[int, ...], end: int
) -> None:
    """Hand over just these cells; all others of the receiver are NaN."""
    for layer, first in enumerate(firsts):
        for side in receiver.cache.layers[layer]:
            side.fill_(torch.nan)
        out = bytearray(packed_bytes(receiver.cache, layer, end - first))
        sender.cache.pack(layer, HERE, first, end, out)
        receiver.cache.scatter(layer, THERE, first, end, out)


@pytest.mark.parametrize("end", [1, WINDOW - 1, WINDOW, WINDOW + 1, 70])
def test_the_next_token_needs_just_the_window(windowed: Path, end: int) -> None:
    prompt = prompt_of(end + 1)
    sender, receiver = runner_of(windowed), runner_of(windowed)
    logits(sender, prompt[:end], 0, HERE)
    expected = logits(sender, prompt[end:], end, HERE)
    spec = sender.model.spec
    firsts = first_tokens(spec, 0, end, end)
    hand_over(sender, receiver, firsts, end)
    torch.testing.assert_close(logits(receiver, prompt[end:], end, THERE), expected)
    kinds = [layer.attention for layer in spec.layers]
    windows = [kind.sliding_window for kind in kinds if isinstance(kind, AttentionSpec)]
    assert windows in ([WINDOW] * 3, [None, WINDOW, WINDOW])
    assert firsts[-1] == max(0, end - WINDOW + 1)
    for layer, window in enumerate(windows):
        if window is not None:
            fewer = (*firsts[:layer], firsts[layer] + 1, *firsts[layer + 1 :])
            hand_over(sender, receiver, fewer, end)
            assert logits(receiver, prompt[end:], end, THERE).isnan().any()


def test_resuming_earlier_needs_the_window_of_that_token(windowed: Path) -> None:
    """As further choices of a request do, which compute the last block of the prompt anew."""
    prompt, end, resume = prompt_of(71), 70, 68
    sender, receiver = runner_of(windowed), runner_of(windowed)
    logits(sender, prompt[:end], 0, HERE)
    expected = logits(sender, prompt[end:], end, HERE)
    for at, whole in ((resume, True), (resume + 1, False)):
        hand_over(sender, receiver, first_tokens(sender.model.spec, 0, end, at), end)
        result = logits(receiver, prompt[resume:], resume, THERE)
        if whole:
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        assert result.isnan().any() != whole
