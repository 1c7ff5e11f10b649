"""Scales of K and V in checkpoints: where they are found, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.shared.config import EngineConfig
from tandem.shared.config.kv_dtypes import kv_dtype_of
from tandem.shared.errors import ModelError
from tandem.shared.kv.layout import UNSCALED
from tandem.shared.weights.kv_scales import read_kv_scales
from tandem.shared.weights.load import load_model
from tandem.shared.weights.obtain import obtain_model
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, rewrite, write_kv_scales

E4M3 = "float8_e4m3fn"


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A checkpoint with scales, as compressed-tensors has them."""
    folder = tmp_path / "scaled"
    write_kv_scales(tiny_models.cached("qwen3", tmp_path), folder, NAMINGS["compressed-tensors"])
    return folder


@pytest.mark.parametrize("name", NAMINGS)
def test_scales_are_found_under_each_name(tmp_path: Path, name: str) -> None:
    folder, naming = tmp_path / "scaled", NAMINGS[name]
    expected = write_kv_scales(tiny_models.cached("qwen3", tmp_path), folder, naming)
    spec = read_spec(folder)
    assert list(read_kv_scales(folder, spec)) == expected
    assert load_model(folder)  # they are no weights
    # As vLLM does, the cache is in fp8 where the configuration describes it so.
    assert kv_dtype_of("auto", "bfloat16", spec.kv_dtype) == (E4M3 if naming.config else "bfloat16")
    assert kv_dtype_of("bfloat16", "bfloat16", spec.kv_dtype) == "bfloat16"


def test_latents_have_the_scale_of_keys(tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    original = tiny_models.cached("deepseek_v3_dense", tmp_path)
    expected = write_kv_scales(original, folder, NAMINGS["vllm"])
    assert list(read_kv_scales(folder, read_spec(folder))) == [(k,) for k, _ in expected]


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    folder = tiny_models.cached("qwen3", tmp_path)
    spec = read_spec(folder)
    assert spec.kv_dtype == "" and read_kv_scales(folder, spec) == UNSCALED


def test_layers_without_scales_have_1(scaled: Path) -> None:
    tensors = load_file(scaled / "model.safetensors")
    spec, whole = read_spec(scaled), read_kv_scales(scaled, read_spec(scaled))
    rest = {name: each for name, each in tensors.items() if "layers.1.self_attn.k_s" not in name}
    rest = {name: each for name, each in rest.items() if "layers.1.self_attn.v_s" not in name}
    assert len(rest) == len(tensors) - 2
    rewrite(scaled, rest, {})
    assert read_kv_scales(scaled, spec) == (whole[0], (1.0, 1.0), *whole[2:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"k_scale": torch.ones(4)},
            r"layers\.1\.self_attn\.k_scale has 4 scales; KV in fp8 has one for all heads",
        ),
        ({"v_scale": torch.tensor(0.0)}, r"self_attn\.v_scale is 0; a scale is positive"),
        ({"v_scale": torch.tensor(torch.inf)}, "v_scale is inf; a scale is positive and finite"),
        ({"v_scale": None}, "layer 1 has a k_scale and no v_scale"),
        ({"k_scale": None}, "layer 1 has a v_scale and no k_scale"),
        (
            {"k_zero_point": torch.tensor([3], dtype=torch.int8)},
            r"k_zero_point is not zero: KV that is quantised asymmetrically is not supported",
        ),
    ],
)
def test_other_scales_are_refused_by_name(
    scaled: Path, change: dict[str, torch.Tensor | None], reason: str
) -> None:
    tensors = load_file(scaled / "model.safetensors")
    for name, value in change.items():
        full = f"model.layers.1.self_attn.{name}"
        tensors.pop(full, None)
        if value is not None:
            tensors[full] = value
    rewrite(scaled, tensors, {})
    with pytest.raises(ModelError, match=rf"{reason}.*; use --kv-cache-dtype bfloat16 or int8"):
        read_kv_scales(scaled, read_spec(scaled))


def test_zero_points_of_zero_change_nothing(scaled: Path) -> None:
    expected = read_kv_scales(scaled, read_spec(scaled))
    tensors = load_file(scaled / "model.safetensors")
    tensors["model.layers.0.self_attn.v_zero_point"] = torch.zeros(1, dtype=torch.int8)
    rewrite(scaled, tensors, {})
    assert read_kv_scales(scaled, read_spec(scaled)) == expected
    assert load_model(scaled)


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": algorithm}


def scheme(**change: Any) -> dict[str, Any]:
    usual = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": usual | change}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (modelopt("NVFP4"), "kv_cache_quant_algo NVFP4"),
        (modelopt("INT8"), "kv_cache_quant_algo INT8"),
        (scheme(strategy="attn_head"), "kv_cache_scheme .*strategy attn_head"),
        (scheme(type="int"), "kv_cache_scheme type int"),
        (scheme(num_bits=4), "kv_cache_scheme .*num_bits 4"),
        (scheme(symmetric=False), "kv_cache_scheme .*symmetric False"),
    ],
)
def test_kv_of_another_format_is_refused_by_name_where_it_is_needed(
    scaled: Path, quantization: dict[str, Any], dtype: str
) -> None:
    rewrite(scaled, None, quantization)
    kv_dtype = read_spec(scaled).kv_dtype
    for spelling in ("auto", "fp8"):
        with pytest.raises(
            ModelError, match=rf"^config.json: .*KV by {dtype}.*: use --kv-cache-dtype bfloat16"
        ):
            kv_dtype_of(spelling, "bfloat16", kv_dtype)
    # Before any weight is downloaded.
    with pytest.raises(ModelError, match=dtype):
        obtain_model(EngineConfig(model=str(scaled)))
    assert obtain_model(EngineConfig(model=str(scaled), kv_cache_dtype="bfloat16"))
    assert kv_dtype_of("bfloat16", "float32", kv_dtype) == "bfloat16"
    assert kv_dtype_of("int8", "float32", kv_dtype) == "int8"
