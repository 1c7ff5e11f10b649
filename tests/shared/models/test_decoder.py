"""Guarantees of the decoder to its callers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.kernels.cpu import jit
from tandem.shared.engine.plan import SequenceStep
from tandem.shared.errors import StartupError
from tandem.shared.kv.cache import KVCache
from tandem.shared.models import decoder
from tandem.shared.models.layers.attention import Attention
from tandem.shared.models.parallel import TensorParallel, WeightPlacement
from tandem.shared.models.spec import AttentionSpec, KVSpec
from tandem.shared.weights.load import random_decoder
from tandem.shared.weights.source import read_spec
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

jit.prepare()

from tandem.kernels.cpu.operators import CompiledOperators  # noqa: E402


def test_on_layer_sees_the_keys_and_values_of_its_layer(model_root: Path) -> None:
    runner = build_runner(
        tiny_models.cached("qwen3", model_root), dtype="float32", block_size=4, num_blocks=4
    )
    calls = []

    def on_layer(index: int) -> None:
        has_rows = [bool(keys[:, 4:7].abs().sum() > 0) for keys, _ in runner.cache.layers]
        calls.append((index, has_rows))

    batch = build_batch([SequenceStep(1, [1, 2, 3], 0, [1], False)], 4, torch.device("cpu"), [])
    with torch.inference_mode():
        hidden = runner.model.forward(batch, runner.cache.layers, on_layer)
    assert calls == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]
    assert hidden.shape == (0, 64)


@dataclass(frozen=True, kw_only=True)
class TwiceSpec(AttentionSpec):
    """Attention that keeps the same KV in two memories."""

    @property
    def memories(self) -> tuple[KVSpec, ...]:
        return self.kv, self.kv


class Twice(Attention):
    """Writes both memories, and attends to the second."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.only_rotates = False  # no operator does both

    def project(self, x: Any, batch: Any, cos_sin: Any, memories: Any) -> torch.Tensor:
        first, second = memories
        super().project(x, batch, cos_sin, [first])
        return super().project(x, batch, cos_sin, [second])

    def attend_heads(self, q: Any, batch: Any, memories: Any) -> torch.Tensor:
        _, second = memories
        return super().attend_heads(q, batch, [second])


def test_a_layer_may_keep_several_memories(
    model_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets all of its own and no other, and each is announced."""
    spec = read_spec(tiny_models.cached("qwen3", model_root))
    first, second, last = spec.layers
    twice = replace(second, attention=TwiceSpec(**vars(second.attention)))
    place = WeightPlacement(torch.float32, torch.device("cpu"), TensorParallel())
    result = decoder._attention
    monkeypatch.setattr(
        decoder,
        "_attention",
        lambda place, spec, *more: (
            Twice(place, spec, *more) if isinstance(spec, TwiceSpec) else result(place, spec, *more)
        ),
    )
    steps = [SequenceStep(1, [1, 2, 3], 0, [1], True), SequenceStep(1, [4], 3, [1], True)]
    actual, caches, announced = [], [], []
    for each in (spec, replace(spec, layers=(first, twice, last))):
        model = random_decoder(each, place, seed=0)
        cache = KVCache(each, num_blocks=4, block_size=4, dtype=torch.float32)
        calls: list[int] = []
        with torch.inference_mode():
            for step in steps:
                batch = build_batch([step], 4, torch.device("cpu"))
                actual.append(model.forward(batch, cache.kv, calls.append))
        caches.append(cache.layers)
        announced.append(calls)
    assert announced == [[0, 1, 2] * 2, [0, 1, 2, 3] * 2]
    torch.testing.assert_close(actual[2:], actual[:2])
    torch.testing.assert_close(caches[1], [caches[0][index] for index in (0, 1, 1, 2)])


def test_a_forward_without_outputs_leaves_the_same_cache(model_root: Path) -> None:
    folder = tiny_models.cached("llama", model_root)
    caches: list[KVCache] = []
    for rows in ([], [4]):
        runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=4)
        sequence = SequenceStep(1, [5, 6, 7, 8, 9], 0, [2, 0], False)
        batch = build_batch([sequence], 4, torch.device("cpu"), rows)
        with torch.inference_mode():
            runner.model.forward(batch, runner.cache.layers)
        caches.append(runner.cache)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.skipif(not jit.multiplies_lines(), reason="the CPU has no AVX-512 VNNI")
def test_logits_in_one_call_are_those_of_the_layers(model_root: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    results: list[tuple[torch.Tensor, KVCache]] = []
    for _ in range(2):
        runner = build_runner(
            folder,
            dtype="bfloat16",
            kv_dtype="float32",
            block_size=4,
            num_blocks=8,
            operators=CompiledOperators(),
        )
        model, cache, calls = runner.model, runner.cache, list[int]()
        sequences = [SequenceStep(n, [5 + n], n, [n, n + 4], True) for n in range(3)]
        batch = build_batch(sequences, 4, torch.device("cpu"), batched_decode=True)
        with torch.inference_mode():
            if results:
                logits = model.decode(batch, cache.kv, calls.append)
            else:
                logits = model.logits(model.forward(batch, cache.kv, calls.append))
            some = build_batch(sequences, 4, torch.device("cpu"), [1], batched_decode=True)
            assert model.decode(some, cache.kv) is None
        assert calls == list(range(len(model.layers)))
        assert logits is not None
        results.append((logits, cache))
    (logits, cache), (others, other_cache) = results
    assert torch.equal(logits, others)
    for one, other in zip(cache.layers, other_cache.layers, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_a_split_that_does_not_divide_is_refused(model_root: Path) -> None:
    spec = read_spec(tiny_models.cached("qwen3", model_root))
    place = WeightPlacement(torch.float32, torch.device("cpu"), TensorParallel(0, 3))
    with pytest.raises(StartupError, match="8 query heads do not divide by 3"):
        random_decoder(spec, place, seed=0)


def test_model_code_names_no_family() -> None:
    folder = Path(__file__).parents[3] / "shared" / "models"
    modules = [*folder.glob("*.py"), *(folder / "layers").glob("*.py")]
    modules.remove(folder / "registry.py")
    assert len(modules) > 15
    for module in modules:
        text = module.read_text().lower()
        for family in ("qwen", "mistral", "deepseek", "gemma", "phi3", "smollm"):
            assert family not in text, (module, family)


def test_bfloat16_stays_near_float32(model_root: Path) -> None:
    folder = tiny_models.cached("qwen3", model_root)
    logits = []
    for dtype in ("float32", "bfloat16"):
        runner = build_runner(folder, dtype=dtype, block_size=4, num_blocks=16)
        batch = build_batch(
            [SequenceStep(1, list(range(50)), 0, list(range(13)), True)], 4, torch.device("cpu")
        )
        with torch.inference_mode():
            logits.append(runner.model.logits(runner.model.forward(batch, runner.cache.layers)))
    exact, rounded = logits
    assert exact is not None
    assert rounded is not None
    assert float((exact - rounded).norm() / exact.norm()) < 0.05
