"""Quantised checkpoints equal those of the numbers that they stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.kernels.cpu import jit
from tandem.kernels.quantized import QuantizedWeight
from tandem.shared.config import EngineConfig
from tandem.shared.errors import ModelError
from tandem.shared.weights.footprint import ParameterSize, parameter_sizes
from tandem.shared.weights.header_files import write_safetensors_header
from tandem.shared.weights.load import load_model
from tandem.shared.weights.obtain import obtain_model
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.shared.weights.gguf.test_models import compiled_operators, logits_of
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import (
    METHODS,
    stack_experts,
    write_mxfp4,
    write_quantized,
    write_stacked,
)
from tandem.tests.support.ranks import build_ranks, check_on_ranks
from tandem.tests.support.rounded_operators import RoundedOperators

jit.prepare()
# Methods whose weights have panels of all kinds.
IN_PANELS = (
    *("fp8 blocks", "gptq 4 order", "gptq 8 zeros", "awq", "compressed int4", "nf4 nested"),
    *("compressed nvfp4", "int8", "mlx 4"),
)
ONE_HEAD = {"head_dim": 8, "num_key_value_heads": 1, "num_hidden_layers": 1}
PROMPT = list(range(40))
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "llama"
    tiny_models.build("llama_bias", folder, num_hidden_layers=2, **WIDE)
    return folder


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize("name", METHODS)
def test_a_model_is_that_of_its_numbers(tmp_path: Path, llama: Path, name: str) -> None:
    """Every matrix to the last bit, and the logits: on one rank, on two, and handed over."""
    quantized, plain = write_quantized(llama, tmp_path, METHODS[name])
    with open_source(quantized) as source, open_source(plain) as expected:
        quantised = [each for each in source.names() if source.block_format(each)]
        assert len(quantised) >= 14
        for each in quantised:
            format = source.block_format(each)
            assert format is not None
            shape = source.shape(each)
            blocks = source.read(each, 0, 0, shape[0])
            assert blocks.shape == (shape[0], format.bytes_of(shape[1]))
            actual = QuantizedWeight(format, blocks, source.order(each)).values()
            assert torch.equal(actual, expected.read(each, 0, 0, shape[0]).float())
            part = source.read(each, 0, 5, shape[0] - 3)
            assert torch.equal(part, blocks[5:-3])
    result = {
        each.name: each
        for each in parameter_sizes(open_source(quantized), read_spec(quantized), "bfloat16")
    }
    for each in ("attention.q", "attention.o", "mlp.gate", "mlp.down"):
        size = result[f"layers.1.{each}.weight"]
        assert size.format not in ("bfloat16", "float32") and size.nbytes < 1.6 * size.values
    assert header_sizes(quantized, tmp_path / "header") == list(result.values())
    check_on_ranks(quantized, PROMPT, partial(after, plain))


def after(plain: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits of the numbers, of a prompt's last token and of what was drawn."""
    ranks = build_ranks(plain)
    return ranks.logits([prompt, *([token] for token in output)], 0, list(range(20)))


@pytest.mark.skipif(not jit.multiplies_bytes(), reason="the CPU has no AVX2")
@pytest.mark.parametrize("name", IN_PANELS)
def test_compiled_kernels_have_the_logits_of_rounded_rows(
    tmp_path: Path, llama: Path, name: str
) -> None:
    """On one rank and on two."""
    quantized, plain = write_quantized(llama, tmp_path, METHODS[name])
    operators, expected = compiled_operators(), logits_of(plain, PROMPT)
    for size in (1, 2):
        result, emulated = (
            build_ranks(quantized, size, operators=each).logits([PROMPT], 0, list(range(10)))[0]
            for each in (operators, RoundedOperators())
        )
        # Sums that differ in the last digit may be rounded to another code, here and there.
        assert (result - emulated).norm() <= 0.02 * emulated.norm()
        assert (result - expected).norm() <= 0.05 * expected.norm()


def test_biases_of_the_model_are_no_additions_of_gptq(tmp_path: Path, llama: Path) -> None:
    """Those of the model are not taken for missing."""
    quantized, _ = write_quantized(llama, tmp_path, METHODS["gptq 4"])
    file, config = quantized / "model.safetensors", EngineConfig(model=str(quantized))
    assert obtain_model(config).generates
    tensors, bias = load_file(file), "model.layers.1.self_attn.q_proj.bias"
    assert bias in tensors
    save_file({each: value for each, value in tensors.items() if each != bias}, file)
    with pytest.raises(ModelError, match=f"lacks {bias}: "):
        obtain_model(config)


def write_header(data: bytes, target: Path) -> None:
    write_safetensors_header(lambda first, end: data[first:end], len(data), target)


def header_sizes(folder: Path, target: Path) -> list[ParameterSize]:
    """The parameters of a checkpoint of which only the headers are there."""
    target.mkdir()
    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.safetensors"):
        write_header(file.read_bytes(), target / file.name)
        assert not any((target / file.name).read_bytes()[-64:])
    return parameter_sizes(open_source(target), read_spec(target), "bfloat16")


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("qwen3_moe", "fp8 blocks", {}),
        ("qwen3_moe", "gptq 4 order", {"moe_intermediate_size": 32}),
        ("qwen3_moe", "mlx 4", {"moe_intermediate_size": 32}),
        ("deepseek_v3", "fp8 blocks", {}),
        ("deepseek_v3", "fp8 tensor", {}),
        ("phi3", "awq", {"num_hidden_layers": 1}),
        ("llama", "mlx 4", {}),
        # Eight outputs, whose zeros fit into a word.
        ("llama", "compressed int4 zeros", ONE_HEAD),
    ],
)
def test_experts_and_latents_are_those_of_their_numbers(
    tmp_path: Path, family: str, name: str, changes: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    tiny_models.build(family, folder, **changes)
    quantized, plain = write_quantized(folder, tmp_path, METHODS[name])
    check_on_ranks(quantized, PROMPT, partial(after, plain))


@pytest.mark.usefixtures("decoded_once")
def test_experts_of_a_layer_in_two_tensors_are_read(tmp_path: Path) -> None:
    """gpt-oss, whose gate and up alternate."""
    folder = tmp_path / "model"
    tiny_models.build("gpt_oss", folder, intermediate_size=64)
    quantized, plain = write_mxfp4(folder, tmp_path)
    with open_source(quantized) as source:
        assert "MXFP4" in source.block_formats()
    check_on_ranks(quantized, PROMPT, partial(after, plain))


@pytest.mark.usefixtures("decoded_once")
@pytest.mark.parametrize(
    ("family", "method", "transpose"),
    [
        # As Qwen3-VL's FP8 is published, and as transformers 5 has experts in memory.
        ("qwen3_moe", "fp8 blocks", True),
        ("qwen3_moe", "fp8 blocks", False),
        ("qwen3_moe", "fp8 channel", True),
        ("qwen3_moe", "fp8 tensor", False),
        ("gpt_oss", "fp8 channel", True),
    ],
)
def test_experts_in_fp8_may_be_stacked(
    tmp_path: Path, family: str, method: str, transpose: bool
) -> None:
    folder = tmp_path / "model"
    sizes: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"moe_intermediate_size": 96},
        "gpt_oss": {"intermediate_size": 64},
    }
    tiny_models.build(family, folder, **sizes[family])
    quantized, plain = write_stacked(folder, tmp_path, METHODS[method], transpose=transpose)
    with open_source(quantized) as source:
        assert "FP8" in source.block_formats()
    check_on_ranks(quantized, PROMPT, partial(after, plain))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gate_up_proj_scale_inv", None, "F8_E4M3 and has no .*gate_up_proj_scale_inv or "),
        ("down_proj", None, "lacks .*down_proj, by "),
        ("down_proj", torch.zeros(12, 3, 64), "gate_up_proj has shape .* imply twice the inputs"),
        ("down_proj_scale_inv", torch.ones(4, 9, 2), "imply one for each expert, or .12, 3, 2"),
    ],
)
def test_stacked_experts_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, change: torch.Tensor | None, reason: str
) -> None:
    folder = tmp_path / "model"
    tiny_models.build("qwen3_moe", folder, moe_intermediate_size=96, num_hidden_layers=1)
    quantized, _ = write_stacked(folder, tmp_path, METHODS["fp8 blocks"], transpose=True)
    tensors = load_file(quantized / "model.safetensors")
    full = f"model.layers.0.mlp.experts.{name}"
    kind = tensors.pop(full).dtype
    if change is not None:
        tensors[full] = change.to(kind)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load_model(quantized)


@pytest.mark.usefixtures("decoded_once")
def test_experts_stacked_by_mlx_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_models.build("qwen3_moe", folder, moe_intermediate_size=32)
    quantized, plain = write_quantized(folder, tmp_path, METHODS["mlx 4"])
    stack_experts(quantized)
    check_on_ranks(quantized, PROMPT, partial(after, plain))
