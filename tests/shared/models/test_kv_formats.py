"""A cache in another format than the weights, against transformers with the same rounding of K and
V."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.shared.config.kv_dtypes import SPELLINGS
from tandem.shared.engine.plan import SequenceStep
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.errors import UsageError
from tandem.shared.handoff.plane.canary import canary_prompt, coarsest, worst_difference
from tandem.shared.handoff.plane.messages import Compare
from tandem.shared.models.spec import layers_before_routing
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, write_kv_scales
from tandem.tests.support.runners import build_runner

from .test_parity import (
    BLOCK,
    STEPS,
    compiled_operators,
    consecutive,
    greedy,
    prompt_of,
    reference,
    reference_run,
    scattered_slots,
)

# Logits of these models are 1.2 in the mean and up to 6.7. Found: 1e-5, 4e-4, 5e-2 (bfloat16 also
# multiplies in it) and 1e-5; of fp8, some value of K or V may be rounded to its other neighbour.
# Rounding K and V to fp8 moves the logits of these models by 0.5 and 1.5.
ATOL = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-1, "fp8": 2e-2, "int8": 2e-2}


class RoundedCache(transformers.DynamicCache):
    """A cache of transformers whose K and V have the precision of ``dtype``, in fp8 after they were
    divided by the scales of a layer."""

    dtype = torch.float32
    scales: Sequence[tuple[float, float]] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scales:
            k, v = self.scales[layer_idx]
            key_states, value_states = (
                self.rounded(key_states / k) * k,
                self.rounded(value_states / v) * v,
            )
        elif self.dtype == torch.int8 and key_states.shape[-1] != value_states.shape[-1]:
            # A latent and its rotated part, which are cached as one vector.
            widths = [key_states.shape[-1], value_states.shape[-1]]
            both = self.rounded(torch.cat([key_states, value_states], dim=-1))
            key_states, value_states = both.split(widths, dim=-1)
        else:
            key_states, value_states = self.rounded(key_states), self.rounded(value_states)
        return super().update(key_states, value_states, layer_idx, *rest)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.int8:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round() * scale
        if self.dtype == torch.float8_e4m3fn:
            x = x.clamp(-448, 448)
        return x.to(self.dtype).float()


def rounded_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The logits of every position, [tokens, V]."""
    cache = RoundedCache(config=reference(folder).config)
    cache.dtype = dtype
    with torch.inference_mode():
        logits: torch.Tensor = reference(folder)(
            torch.tensor([tokens]), past_key_values=cache, use_cache=True
        ).logits[0]
    return logits


def rounded_run(
    folder: Path, prompt: list[int], scales: Sequence[tuple[float, float]]
) -> list[int]:
    """The greedy tokens of transformers with a cache in fp8 with scales."""
    cache = RoundedCache(config=reference(folder).config)
    cache.dtype, cache.scales = torch.float8_e4m3fn, scales
    output: list[int] = []
    with torch.inference_mode():
        for _ in range(STEPS):
            values = torch.tensor([output[-1:] or prompt])
            result = reference(folder)(values, past_key_values=cache, use_cache=True).logits
            output.append(int(result[0, -1].argmax()))
    return output


def logits(runner: ModelRunner, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
    cache, rows = runner.cache, SequenceStep(1, tokens, start, table, True)
    batch = build_batch([rows], cache.block_size, cache.device)
    with torch.inference_mode():
        result = runner.model.logits(runner.model.forward(batch, cache.kv))
    assert result is not None
    return result[0]


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
    assert runner.cache.layers[0][-1].dtype == runner.cache.kv[0][0].dtype == dtype
    prompt, (following, _) = prompt_of(50), reference_run(folder, 50)
    expected = rounded_logits(folder, prompt + following, dtype)
    table = consecutive(3, 70)
    logits(runner, prompt[:31], 0, table)
    worst = (logits(runner, prompt[31:], 31, table) - expected[49]).abs().max()
    for step, token in enumerate(following):
        result = logits(runner, [token], 50 + step, table)
        worst = max(worst, (result - expected[50 + step]).abs().max())
    assert worst < ATOL[spelling]


def test_greedy_with_a_float32_cache_is_that_of_transformers(model_root: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    runner = build_runner(
        folder, dtype="float32", kv_dtype="float32", block_size=BLOCK, num_blocks=60
    )
    assert greedy(runner, prompt_of(50), consecutive(0, 70), 7) == reference_run(folder, 50)[0]


def test_half_weights_may_have_a_float32_cache(model_root: Path) -> None:
    """K and V are cached as the weights' dtype gives them, without further rounding."""
    folder = tiny_models.cached("qwen3", model_root)
    results = {}
    for spelling in ("float32", "auto"):
        runner = build_runner(
            folder, dtype="bfloat16", kv_dtype=spelling, block_size=BLOCK, num_blocks=60
        )
        results[spelling] = logits(runner, prompt_of(50), 0, consecutive(0, 50))
        assert runner.model.place.dtype == torch.bfloat16
    torch.testing.assert_close(results["float32"], results["auto"], atol=0.5, rtol=0)
    assert not torch.equal(results["float32"], results["auto"])


@pytest.mark.parametrize("spelling", ["fp8", "int8"])
def test_bytes_in_chunks_over_scattered_blocks_and_compiled_give_the_same_tokens(
    model_root: Path, spelling: str
) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    runs = [
        greedy(
            build_runner(
                folder,
                dtype="float32",
                kv_dtype=spelling,
                block_size=BLOCK,
                num_blocks=60,
                operators=operators,
            ),
            prompt_of(50),
            table,
            chunk,
        )
        for table, chunk, operators in (
            (consecutive(0, 70), 10_000, None),
            (consecutive(9, 70)[::-1], 7, None),
            (consecutive(9, 70)[::-1], 7, compiled_operators()),
        )
    ]
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) > STEPS // 2


def check_greedy(runner: ModelRunner, folder: Path, scales: Sequence[tuple[float, float]]) -> None:
    """The tokens that a runner draws are those of transformers with a cache so rounded."""
    expected = rounded_run(folder, prompt_of(50), scales)
    assert greedy(runner, prompt_of(50), scattered_slots(5, 70), 7) == expected
    assert len(set(expected)) > STEPS // 2


@pytest.mark.parametrize("naming", NAMINGS)
def test_tokens_with_the_scales_of_a_checkpoint_are_those_of_a_cache_so_rounded(
    model_root: Path, tmp_path: Path, naming: str
) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    scales = write_kv_scales(folder, tmp_path / "scaled", NAMINGS[naming])
    spelling = "fp8" if NAMINGS[naming].config is None else "auto"
    runner = build_runner(
        tmp_path / "scaled", dtype="float32", kv_dtype=spelling, block_size=BLOCK, num_blocks=60
    )
    check_greedy(runner, folder, scales)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "deepseek_v3_dense"])
def test_attention_of_each_kind_takes_scales(model_root: Path, tmp_path: Path, name: str) -> None:
    """A cap, a window, sinks, and latents, which have the scale of keys; with compiled kernels
    where there are any."""
    folder = tiny_models.cached(name, model_root)
    scales = write_kv_scales(folder, tmp_path / "scaled", NAMINGS["vllm"])
    if name == "deepseek_v3_dense":
        scales = [(k, k) for k, _ in scales]
    runner = build_runner(
        tmp_path / "scaled",
        dtype="float32",
        kv_dtype="fp8",
        block_size=BLOCK,
        num_blocks=60,
        operators=compiled_operators(),
    )
    check_greedy(runner, folder, scales)


def test_scales_are_left_out_of_a_cache_that_is_not_fp8(model_root: Path, tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    write_kv_scales(folder, tmp_path / "scaled", NAMINGS["modelopt"])
    runner = build_runner(
        tmp_path / "scaled", dtype="float32", kv_dtype="float32", block_size=BLOCK, num_blocks=60
    )
    assert greedy(runner, prompt_of(50), consecutive(0, 70), 7) == reference_run(folder, 50)[0]


class CanaryOfRunners:
    """One short prompt through both runners, whose KV the second then has twice."""

    def __init__(self, sender: ModelRunner, receiver: ModelRunner) -> None:
        self.receiver = receiver
        self.formats = [
            str(dtype).removeprefix("torch.")
            for runner in (sender, receiver)
            for dtype in (runner.cache.dtype, runner.model.place.dtype)
        ]
        self.prompt = canary_prompt(tiny_models.VOCAB, 512)
        self.end = len(self.prompt) - 1
        self.ours, self.arrived, theirs = consecutive(0, 31), scattered_slots(8, 31), [5, 1, 9, 2]
        logits(sender, self.prompt[: self.end], 0, theirs)
        logits(receiver, self.prompt[: self.end], 0, self.ours)
        for layer in range(len(receiver.cache.layers)):
            out = bytearray(receiver.cache.packed_bytes(layer, self.end))
            scales = [each.scale for each in receiver.cache.layout[layer].values]
            kv_dtype = receiver.cache.kv_dtype
            sender.cache.pack(layer, theirs, 0, self.end, out, None, kv_dtype, scales)
            receiver.cache.scatter(layer, self.arrived, 0, self.end, out)

    def ratio(self, exact_layers: int | None = None) -> float:
        cache, spec = self.receiver.cache, self.receiver.model.spec
        compare = Compare(
            transfer_id=0,
            attempt=0,
            ours=tuple(self.ours),
            theirs=tuple(self.arrived),
            first_token=0,
            end_token=self.end,
            rounding=coarsest(self.formats),
            exact_layers=exact_layers or layers_before_routing(spec),
        )
        return worst_difference(cache, compare).ratio


def ratios(
    senders: Iterable[ModelRunner], receiver: ModelRunner, formats: Iterable[str]
) -> list[float]:
    """That of each sender beside a receiver whose weights are in ``formats``."""
    results = []
    for sender in senders:
        canary = CanaryOfRunners(sender, receiver)
        canary.formats += formats
        results.append(canary.ratio())
    return results


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
    canary = CanaryOfRunners(sender, receiver)
    assert canary.ratio() < 1
    prompt, end = canary.prompt, canary.end
    local, remote = (
        logits(receiver, prompt[end:], end, table) for table in (canary.ours, canary.arrived)
    )
    loss = {"fp8": 1.0, "int8": 0.4}
    limit = 1e-4 if here == there else max(loss.get(each, 0.1) for each in (here, there))
    assert (local - remote).abs().max() < limit


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (("scaled", "fp8"), ("scaled", "fp8")),
        (("scaled", "fp8"), ("plain", "fp8")),
        (("plain", "fp8"), ("scaled", "fp8")),
        (("scaled", "fp8"), ("plain", "bfloat16")),
        (("plain", "bfloat16"), ("scaled", "fp8")),
        (("other", "fp8"), ("scaled", "fp8")),
    ],
    ids=str,
)
def test_scales_may_differ_between_the_two_sides(
    model_root: Path, tmp_path: Path, there: tuple[str, str], here: tuple[str, str]
) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    write_kv_scales(folder, tmp_path / "scaled", NAMINGS["vllm"], size=30)
    write_kv_scales(folder, tmp_path / "other", NAMINGS["older vllm"], size=20)
    folders = {"plain": folder, "scaled": tmp_path / "scaled", "other": tmp_path / "other"}
    sender, receiver = (
        build_runner(
            folders[name], dtype="float32", kv_dtype=spelling, block_size=size, num_blocks=24
        )
        for (name, spelling), size in ((there, 8), (here, 4))
    )
    canary = CanaryOfRunners(sender, receiver)
    assert canary.ratio() < 1
    end = canary.end
    local, remote = (
        logits(receiver, canary.prompt[end:], end, table) for table in (canary.ours, canary.arrived)
    )
    assert (local - remote).abs().max() < (1e-4 if here == there else 1.0)


def test_a_canary_lets_rounding_send_tokens_to_other_experts_and_still_sees_other_weights(
    tmp_path: Path,
) -> None:
    """Twelve layers, eleven routers; in bfloat16 some tokens end up elsewhere."""
    for seed in (0, 1):
        tiny_models.build("deepseek_v3", tmp_path / str(seed), seed=seed, num_hidden_layers=12)
    exact, rounded, other = (
        build_runner(tmp_path / seed, dtype=dtype, block_size=size, num_blocks=24)
        for seed, dtype, size in (("0", "float32", 8), ("0", "bfloat16", 4), ("1", "float32", 8))
    )
    same = CanaryOfRunners(exact, rounded)
    assert same.ratio(exact_layers=12) > 2
    assert same.ratio() < 1
    assert CanaryOfRunners(other, rounded).ratio() > 2


@pytest.mark.parametrize("spelling", ["fp8_e5m2", "int4", ""])
def test_a_format_that_is_not_implemented_is_refused_by_name(
    model_root: Path, spelling: str
) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    with pytest.raises(UsageError, match=rf"--kv-cache-dtype '{spelling}' .* fp8_e4m3"):
        build_runner(folder, kv_dtype=spelling, block_size=BLOCK, num_blocks=4)
