"""What rounded weights do to KV: as docs/handoff.md derives it, in random models, and beside the
canary's limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.kernels.block_encoding import encode
from tandem.kernels.block_formats import Q4_0, Q6_K, Q8_0, BlockFormat, group_format
from tandem.kernels.quantized import QuantizedWeight
from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.handoff.plane.canary import tolerance
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.packed_kv import packed_bytes
from tandem.tests.support.runners import build_runner

from .test_kv_formats import CanaryOfRunners

LAYERS = 8
FORMATS = {"Q8_0": Q8_0, "FP8": group_format("e4m3", 8, 128, "F32"), "Q4_0": Q4_0}


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rounding(format: BlockFormat) -> float:
    """The error of weights, relative to their own size; both by their mean squares."""
    weight = gaussian(64, 512)
    values = QuantizedWeight(format, encode(format, weight), None).values()
    return float((values - weight).square().mean().sqrt())


def derived(rounding: float, layer: int) -> float:
    """The difference of K and V from unrounded ones, relative to their own size."""
    return rounding * math.sqrt(2 + 8 * layer)


@pytest.mark.parametrize(
    ("format", "group", "steps"), [(Q8_0, 32, 127), (Q6_K, 16, 32), (Q4_0, 32, 8)]
)
def test_weights_err_by_a_step_over_the_root_of_12(
    format: BlockFormat, group: int, steps: int
) -> None:
    """There are so many steps up to the largest of a group."""
    largest = float(gaussian(10_000, group).abs().amax(1).mean())
    assert rounding(format) == pytest.approx(largest / steps / math.sqrt(12), rel=0.1)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelRunner]:
    folder = tmp_path_factory.mktemp("rounding") / "model"
    shape: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "hidden_size": 256,
        "intermediate_size": 512,
    }
    tiny_models.build("qwen3", folder, **shape)
    return folder, build_runner(folder, dtype="float32", block_size=8, num_blocks=24)


@pytest.mark.parametrize("name", FORMATS)
def test_kv_differs_as_derived_and_less_than_the_limits(
    exact: tuple[Path, ModelRunner], name: str
) -> None:
    """The limits are for the largest difference in a layer, which is up to twice the mean."""
    folder, sender = exact
    receiver = build_runner(folder, dtype="float32", block_size=4, num_blocks=24, isq=name.lower())
    canary, error = CanaryOfRunners(sender, receiver), rounding(FORMATS[name])
    for layer in range(LAYERS):
        ours, theirs = (
            np.frombuffer(packed_kv(receiver, layer, table, canary.end), np.float32)
            for table in (canary.ours, canary.arrived)
        )
        result = math.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean())
        expected = derived(error, layer)
        assert expected / 1.5 < result < 1.5 * expected
        assert tolerance(name, layer) > 1.5 * expected


def packed_kv(runner: ModelRunner, layer: int, table: list[int], end: int) -> bytearray:
    out = bytearray(packed_bytes(runner.cache, layer, end))
    runner.cache.pack(layer, table, 0, end, out)
    return out
