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
from tandem.tests.shared.weights.gguf.test_models import logits_of
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import (
    FP8,
    METHODS,
    Tensors,
    write_quantized,
)

Q = "model.layers.0.self_attn.q_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("plain") / "model"
    tiny_models.build("llama", result, num_hidden_layers=1)
    return result


def drop(ending: str) -> Callable[[Tensors], None]:
    return lambda tensors: void(tensors.pop(f"{Q}.{ending}"))


def put(ending: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{Q}.{ending}": value})


def state(text: str | None = None, /, **values: Any) -> Callable[[Tensors], None]:
    """The text of a quant state, or some of its values."""

    def change(tensors: Tensors) -> None:
        name = f"{Q}.{STATE}"
        names = json.loads(bytes(tensors[name].tolist()))
        content = text or json.dumps(names | values)
        tensors[name] = torch.tensor(list(content.encode()), dtype=torch.uint8)

    return change


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    return lambda tensors: void([change(tensors) for change in changes])


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
            "does not have groups of 32 inputs",
        ),
        ("gptq 4 order", put("g_idx", torch.arange(64) % 3), {}, "is saved in I64, but "),
        ("awq", put("scales", torch.ones(1, 128).half()), {}, "imply [2, 128]"),
        ("compressed int4", drop("weight_shape"), {}, f"lacks {Q}.weight_shape, by "),
        ("compressed int4", drop("weight_scale"), {}, f"lacks {Q}.weight_scale, by "),
        ("nf4", drop("weight.quant_state.bitsandbytes__nf4"), {}, "is saved in U8 and has no"),
        ("nf4", put("weight.quant_map", torch.ones(16)), {}, "does not have the values of nf4"),
        ("nf4", put("weight.absmax", torch.ones(5)), {}, "shape [5], but the weights beside it"),
        (
            "nf4",
            put("weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8)),
            {},
            "quant_state.bitsandbytes__nf4 is not JSON (",
        ),
        ("nf4", state("[" * 4000), {}, f"{STATE} is not JSON (maximum recursion depth exceeded"),
        ("nf4", state("[]"), {}, f"{STATE} holds a list, not an object"),
        ("nf4", state(" " * 5000), {}, f"{STATE} has shape [5000], but "),
        ("nf4", put(STATE, torch.zeros(2, 2, 2).byte()), {}, f"{STATE} has shape [2, 2, 2], but "),
        ("nf4", state(quant_type="fp4"), {}, f"{STATE}: quant_type is 'fp4'; supported: 'nf4'"),
        ("nf4", state(shape=[1e999, 2]), {}, f"{STATE}: shape: outputs is inf; supported: a pos"),
        ("nf4", state(shape=8192), {}, f"{STATE}: shape is 8192; supported: a list of two sizes"),
        ("nf4", state(blocksize=1e999), {}, f"{STATE}: blocksize is inf; supported: a positive"),
        ("nf4", state(blocksize=0), {}, f"{STATE}: blocksize is 0; supported: a positive integer"),
        ("nf4 nested", state(nested_blocksize=0), {}, f"{STATE}: nested_blocksize is 0; support"),
        ("nf4 nested", state(nested_blocksize=None), {}, f"{STATE}: nested_blocksize is null; "),
        ("nf4 nested", state(nested_blocksize=1 << 41), {}, "supported: a positive integer up to"),
        ("nf4 nested", state(nested_offset="x"), {}, f"{STATE}: nested_offset is 'x'; supported"),
        ("nf4 nested", state(nested_offset=1e999), {}, "nested_offset is inf; supported: a finite"),
        ("nf4", put("weight", torch.zeros(64, 64).byte()), {}, "imply 128 x 64 values of 4 bits"),
        (
            "nf4",
            both(state(blocksize=1), put("weight.absmax", torch.ones(128 * 64))),
            {},
            "weight.absmax has shape [8192], but the weights beside it and ",
        ),
        ("compressed w8a8", put("weight_scale", torch.ones(0, 5)), {}, "imply one for all, or for"),
        ("compressed w8 zeros", put("weight_zero_point", torch.ones(128, 2)), {}, "saved in F32, "),
        ("modelopt nvfp4", put("weight_scale_2", torch.ones(2)), {}, "[2], but the weights beside"),
        ("modelopt nvfp4", put("weight_scale_2", torch.ones(0)), {}, "imply one number"),
        ("fp8 tensor", put("weight", torch.ones(1, 0).to(FP8)), {}, "imply some outputs and input"),
        ("fp8 channel", put("weight_scale", torch.ones(128, 0)), {}, "one for all, or for each of"),
        ("compressed int4", put("weight_scale", torch.ones(128, 50)), {}, "equal groups of 64 inp"),
        ("compressed int4", put("weight_shape", torch.tensor([5, 64])), {}, "imply 5 outputs, by "),
        ("compressed int4", nothing, {"sparsity_config": [1]}, "sparsity_config is [1]; supported"),
        ("fp8 tensor", nothing, {"quant_method": "x\n"}, r"method 'x\n'), "),
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
    quantized, _ = write_quantized(folder, tmp_path, METHODS[method])
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    values = json.loads((quantized / "config.json").read_text())
    values[METHODS[method].key] |= config
    (quantized / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as caught:
        load_model(quantized)
    message = str(caught.value)
    assert words in message and "\n" not in message and str(quantized) in message


def allocated(folder: Path) -> int:
    """Bytes that torch allocates while a folder is loaded, those that it frees as well."""
    with torch.profiler.profile(profile_memory=True) as profile:
        load_model(folder)
    events = profile.profiler.kineto_results.events()
    return sum(max(0, each.nbytes()) for each in events if each.name() == "[memory]")


@pytest.mark.parametrize(
    ("method", "change", "config"),
    [
        ("nf4 nested", state(nested_blocksize=200_000_000), {}),
        ("gptq 8", nothing, {"group_size": 1 << 40}),
    ],
)
def test_groups_beyond_the_weights_are_all_of_them(
    tmp_path: Path, folder: Path, method: str, change: Callable[[Tensors], None], config: Any
) -> None:
    """And take no memory for what is beyond."""
    quantized, _ = write_quantized(folder, tmp_path, METHODS[method])
    prompt = list(range(40))
    expected, needed = logits_of(quantized, prompt), allocated(quantized)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    values = json.loads((quantized / "config.json").read_text())
    values[METHODS[method].key] |= config
    (quantized / "config.json").write_text(json.dumps(values))
    assert torch.equal(logits_of(quantized, prompt), expected)
    assert allocated(quantized) < 1.1 * needed


def test_scales_of_a_cache_in_8_bits_are_passed_over(tmp_path: Path, folder: Path) -> None:
    for name in ("compressed fp8", "modelopt fp8"):
        quantized, _ = write_quantized(folder, tmp_path / name, METHODS[name])
        tensors = load_file(quantized / "model.safetensors")
        for each in ("k_scale", "v_scale", "k_proj.k_scale", "q_scale"):
            tensors[f"model.layers.0.self_attn.{each}"] = torch.tensor(0.5)
        save_file(tensors, quantized / "model.safetensors")
        assert load_model(quantized)


def test_numbers_beside_scales_of_a_cache_are_numbers(tmp_path: Path, folder: Path) -> None:
    quantized, _ = write_quantized(folder, tmp_path, METHODS["modelopt fp8"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, quantized / "model.safetensors")
    table = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(table))
    assert load_model(quantized).spec.dtype == "float32"
