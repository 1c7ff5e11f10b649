"""Quantised checkpoints that are not whole, or not what their config says: one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.shared.errors import ModelError
from tandem.shared.weights.load import load_model
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import METHODS, Tensors, write_quantized

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plain") / "model"
    tiny_models.build("llama", made, num_hidden_layers=1)
    return made


def drop(ending: str) -> Callable[[Tensors], None]:
    return lambda tensors: void(tensors.pop(f"{Q}.{ending}"))


def put(ending: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{Q}.{ending}": value})


def void(_: object) -> None:
    """Ignore a result."""


def nothing(_: Tensors) -> None:
    """Change only the config."""


@pytest.mark.parametrize(
    ("method", "change", "config", "words"),
    [
        ("fp8 blocks", drop("weight_scale_inv"), {}, f"{Q}.weight is saved in F8_E4M3 and has no"),
        ("fp8 blocks", put("weight_scale_inv", torch.ones(3, 2)), {}, "shape [3, 2], but the wei"),
        ("fp8 blocks", put("weight_scale_inv", torch.ones(4, 2).int()), {}, "is saved in I32, but"),
        ("fp8 blocks", nothing, {"weight_block_size": [64, 64]}, "quantization_config imply ["),
        ("fp8 blocks", put("weight", torch.ones(128, 64).to(torch.float8_e5m2)), {}, "in F8_E5M2"),
        ("gptq 4", drop("scales"), {}, f"lacks {Q}.scales, by "),
        ("gptq 4", drop("qzeros"), {}, f"lacks {Q}.qzeros, by "),
        ("gptq 4", put("qzeros", torch.ones(2, 3).int()), {}, "[2, 3], but the weights beside it"),
        ("gptq 4", nothing, {"group_size": 16}, "groups of 16 inputs: "),
        ("gptq 4", put("qzeros", torch.full((2, 16), 5).int()), {}, "zeros other than 8, but "),
        ("gptq 4", put("qweight", torch.ones(9, 128).int()), {}, "imply 64 inputs, of "),
        (
            "gptq 4 order",
            put("g_idx", torch.zeros(64).int() + 1),
            {},
            "has not groups of 32 inputs",
        ),
        ("gptq 4 order", put("g_idx", torch.arange(64) % 3), {}, "is saved in I64, but "),
        ("awq", put("scales", torch.ones(1, 128).half()), {}, "imply [2, 128]"),
        ("compressed int4", drop("weight_shape"), {}, f"lacks {Q}.weight_shape, by "),
        ("compressed int4", drop("weight_scale"), {}, f"lacks {Q}.weight_scale, by "),
        ("nf4", drop("weight.quant_state.bitsandbytes__nf4"), {}, "is saved in U8 and has no"),
        ("nf4", put("weight.quant_map", torch.ones(16)), {}, "has not the numbers of nf4"),
        ("nf4", put("weight.absmax", torch.ones(5)), {}, "shape [5], but the weights beside it"),
        (
            "nf4",
            put("weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8)),
            {},
            "is not a valid description",
        ),
        ("int8", put("SCB", torch.ones(3)), {}, "imply [128]"),
        ("mlx 4", drop("scales"), {}, f"{Q}.weight is saved in U32 and has no .scales beside it"),
        ("mlx 4", drop("biases"), {}, f"lacks {Q}.biases, by "),
        ("mlx 4", nothing, {"group_size": 128}, "in groups of 128, by "),
        ("modelopt nvfp4", drop("weight_scale_2"), {}, f"lacks {Q}.weight_scale_2, by "),
    ],
)
def test_a_wrong_folder_is_refused_in_one_line(
    tmp_path: Path,
    folder: Path,
    method: str,
    change: Callable[[Tensors], None],
    config: dict[str, Any],
    words: str,
) -> None:
    coded, _ = write_quantized(folder, tmp_path, METHODS[method])
    tensors = load_file(coded / "model.safetensors")
    change(tensors)
    save_file(tensors, coded / "model.safetensors")
    values = json.loads((coded / "config.json").read_text())
    values[METHODS[method].key] |= config
    (coded / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        load_model(coded)
    told = str(caught.value)
    assert words in told and "\n" not in told and str(coded) in told


def test_scales_of_a_cache_in_8_bits_are_passed_over(tmp_path: Path, folder: Path) -> None:
    for name in ("compressed fp8", "modelopt fp8"):
        coded, _ = write_quantized(folder, tmp_path / name, METHODS[name])
        tensors = load_file(coded / "model.safetensors")
        for each in ("k_scale", "v_scale", "k_proj.k_scale", "q_scale"):
            tensors[f"model.layers.0.self_attn.{each}"] = torch.tensor(0.5)
        save_file(tensors, coded / "model.safetensors")
        assert load_model(coded)


def test_numbers_beside_scales_of_a_cache_are_numbers(tmp_path: Path, folder: Path) -> None:
    coded, _ = write_quantized(folder, tmp_path, METHODS["modelopt fp8"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, coded / "model.safetensors")
    table = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (coded / "hf_quant_config.json").write_text(json.dumps(table))
    assert load_model(coded).spec.dtype == "float32"
