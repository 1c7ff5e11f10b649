"""A cache in another format than the weights, against transformers with the same rounding of K and
V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.shared.engine.plan import SequenceStep
from tandem.shared.engine.rank_setup import CacheOfPlane
from tandem.shared.engine.runner import ModelRunner, build_runner
from tandem.shared.errors import UsageError
from tandem.shared.handoff.canary import canary_prompt, coarsest, worst_difference
from tandem.shared.kv.formats import SPELLINGS
from tandem.shared.models.batch import build_batch

from ... import tiny_models
from .test_parity import (
    BLOCK,
    STEPS,
    consecutive,
    greedy,
    prompt_of,
    reference,
    reference_run,
    scattered,
)

# Logits of these models are 1.2 in the mean and up to 6.7. Found: 1e-5, 4e-4, 5e-2 (bfloat16 also
# multiplies in it) and 1e-5; of fp8, some value of K or V may be rounded to its other neighbour.
# Rounding K and V to fp8 moves the logits of these models by 0.5 and 1.5.
ATOL = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-1, "fp8": 2e-2}


class RoundedCache(transformers.DynamicCache):
    """What attention reads back of K and V has the precision of ``dtype``."""

    dtype = torch.float32

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(self.rounded(key_states), self.rounded(value_states), *rest, **more)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float8_e4m3fn:
            x = x.clamp(-448, 448)
        return x.to(self.dtype).float()


def rounded_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Of every position, [tokens, V]."""
    cache = RoundedCache(config=reference(folder).config)
    cache.dtype = dtype
    with torch.inference_mode():
        logits: torch.Tensor = reference(folder)(
            torch.tensor([tokens]), past_key_values=cache, use_cache=True
        ).logits[0]
    return logits


def logits(runner: ModelRunner, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
    cache, rows = runner.cache, SequenceStep(1, tokens, start, table, True)
    batch = build_batch([rows], cache.block_size, cache.device)
    with torch.inference_mode():
        got = runner.model.logits(runner.model.forward(batch, cache.layers))
    assert got is not None
    return got[0]


@pytest.mark.parametrize("spelling", ATOL)
@pytest.mark.parametrize("name", ["qwen3", "mistral", "deepseek_v3_dense"])
def test_logits_are_those_of_a_reference_with_kv_of_that_format(
    model_root: Path, name: str, spelling: str
) -> None:
    folder = tiny_models.cached(name, model_root)
    runner = build_runner(
        folder, dtype="float32", kv_dtype=spelling, block_size=BLOCK, num_blocks=60
    )
    dtype = getattr(torch, SPELLINGS[spelling])
    assert runner.cache.layers[0][0].dtype == dtype
    prompt, (following, _) = prompt_of(50), reference_run(folder, 50)
    expected = rounded_logits(folder, prompt + following, dtype)
    table = consecutive(3, 70)
    logits(runner, prompt[:31], 0, table)
    worst = (logits(runner, prompt[31:], 31, table) - expected[49]).abs().max()
    for step, token in enumerate(following):
        got = logits(runner, [token], 50 + step, table)
        worst = max(worst, (got - expected[50 + step]).abs().max())
    assert worst < ATOL[spelling]


def test_greedy_with_a_float32_cache_is_that_of_transformers(model_root: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    runner = build_runner(
        folder, dtype="float32", kv_dtype="float32", block_size=BLOCK, num_blocks=60
    )
    assert greedy(runner, prompt_of(50), consecutive(0, 70), 7) == reference_run(folder, 50)[0]


def test_half_weights_may_have_a_float32_cache(model_root: Path) -> None:
    """What is cached then is what the weights' format gives, not rounded once more."""
    folder = tiny_models.cached("qwen3", model_root)
    got = {}
    for spelling in ("float32", "auto"):
        runner = build_runner(
            folder, dtype="bfloat16", kv_dtype=spelling, block_size=BLOCK, num_blocks=60
        )
        got[spelling] = logits(runner, prompt_of(50), 0, consecutive(0, 50))
        assert runner.model.place.dtype == torch.bfloat16
    torch.testing.assert_close(got["float32"], got["auto"], atol=0.5, rtol=0)
    assert not torch.equal(got["float32"], got["auto"])


def test_fp8_in_chunks_and_over_scattered_blocks_gives_the_same_tokens(model_root: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    runs = [
        greedy(
            build_runner(folder, dtype="float32", kv_dtype="fp8", block_size=BLOCK, num_blocks=60),
            prompt_of(50),
            table,
            chunk,
        )
        for table, chunk in ((consecutive(0, 70), 10_000), (consecutive(9, 70)[::-1], 7))
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) > STEPS // 2


@pytest.mark.parametrize("there", ATOL)
@pytest.mark.parametrize("here", ATOL)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3_dense"])
def test_every_pair_of_formats_passes_the_canary_and_decodes(
    model_root: Path, name: str, there: str, here: str
) -> None:
    """The first token's logits are as far from those of a local prefill as rounding moves them."""
    folder = tiny_models.cached(name, model_root)
    sender, receiver = (
        build_runner(folder, dtype="float32", kv_dtype=spelling, block_size=size, num_blocks=24)
        for spelling, size in ((there, 8), (here, 4))
    )
    prompt = canary_prompt(tiny_models.VOCAB, 512)
    end, ours, arrived = len(prompt) - 1, consecutive(0, 31), scattered(8, 31)
    logits(sender, prompt[:end], 0, [5, 1, 9, 2])
    logits(receiver, prompt[:end], 0, ours)
    for layer in range(len(receiver.cache.layers)):
        out = bytearray(receiver.cache.packed_bytes(layer, end))
        sender.cache.pack(layer, [5, 1, 9, 2], 0, end, out, None, receiver.cache.dtype)
        receiver.cache.scatter(layer, arrived, 0, end, out)
    formats = SPELLINGS[here], SPELLINGS[there]
    port = CacheOfPlane(receiver.cache)
    worst = worst_difference(port, formats[0], coarsest(formats), ours, arrived, 0, end)
    assert worst.ratio < 1
    local, remote = (logits(receiver, prompt[end:], end, table) for table in (ours, arrived))
    limit = 1e-4 if len(set(formats)) == 1 else 1.0 if "float8_e4m3fn" in formats else 0.1
    assert (local - remote).abs().max() < limit


@pytest.mark.parametrize("spelling", ["fp8_e5m2", "int8", ""])
def test_a_format_that_is_not_implemented_is_refused_by_name(
    model_root: Path, spelling: str
) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    with pytest.raises(UsageError, match=rf"--kv-cache-dtype '{spelling}' .* fp8_e4m3"):
        build_runner(folder, kv_dtype=spelling, block_size=BLOCK, num_blocks=4)
