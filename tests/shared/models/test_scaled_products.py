"""Whole models whose activations are rounded to e4m3, as their checkpoints say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.kernels.gpu.scaled_linear import ScaledLinear
from tandem.kernels.reference.linear import multiplies
from tandem.shared.weights.source import open_source
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized
from tandem.tests.support.runners import build_runner

from .test_kv_formats import CanaryOfRunners

pytest.importorskip("triton")

from tandem.kernels.gpu import scaled_linear
from tandem.kernels.gpu.operators import GpuOperators


@pytest.mark.parametrize("method", ["fp8 blocks", "fp8 channel", "modelopt fp8", "compressed fp8"])
def test_checkpoints_say_whether_they_round_activations(tmp_path: Path, method: str) -> None:
    tiny_models.build("qwen3", tmp_path / "whole")
    quantized, _ = write_quantized(tmp_path / "whole", tmp_path, METHODS[method])
    with open_source(quantized) as source:
        format = source.block_format("model.layers.0.self_attn.q_proj.weight")
    # compressed-tensors describes activations beside weights, here none.
    assert getattr(format, "rounds_inputs", None) == (method != "compressed fp8")


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="activations are float32 here")
def test_a_canary_allows_for_activations_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, which multiplies codes too."""
    monkeypatch.setattr(scaled_linear, "capability_of", lambda device: (9, 0))
    tiny_models.build("qwen3", tmp_path / "whole", dtype="bfloat16", num_hidden_layers=8)
    quantized, _ = write_quantized(tmp_path / "whole", tmp_path, METHODS["fp8 channel"])
    scaled, exact = (
        build_runner(
            quantized, dtype="bfloat16", block_size=size, num_blocks=24, operators=operators
        )
        for size, operators in ((8, GpuOperators()), (4, None))
    )
    method = scaled.model.layers[0].mlp.down.method  # type: ignore[union-attr]
    assert isinstance(method.runs()[0], ScaledLinear)
    canary = CanaryOfRunners(scaled, exact)
    canary.formats.append("FP8")
    assert 0.01 < canary.ratio() < 1
