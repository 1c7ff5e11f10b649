"""Quantized checkpoints are refused by their method, wherever a file names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.models.model_config import read_config
from tandem.shared.models.registry import FAMILIES, NOT_IN_GGUF, spec_of
from tandem.shared.weights.gguf.architectures import ARCHITECTURES, VARIANTS
from tandem.tests.shared.models.families.test_families import BASE

OTHER = "use the model's bfloat16 or float16 version, or a GGUF file of it"
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def refusal(folder: Path, files: dict[str, dict[str, Any]], **changes: Any) -> str:
    for name, content in {"config.json": {**BASE, **changes}, **files}.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelError) as caught:
        spec_of(read_config(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "fmt": "e4m3"}, "fp8: fmt e4m3"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq: bits 4"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq: bits 4"),
        (
            "quantization_config",
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
            "bitsandbytes: load_in_4bit",
        ),
        (
            "quantization_config",
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors: format pack-quantized",
        ),
        ("quantization_config", {"quant_method": "mxfp4"}, "mxfp4"),
        (
            "quantization_config",
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "modelopt: quant_algo NVFP4",
        ),
        ("quantization_config", {"quant_algo": "FP8"}, "not named: quant_algo FP8"),
        ("quantization_config", {"group_size": 64, "bits": 4}, "MLX: bits 4, group_size 64"),
        ("quantization", {"group_size": 64, "bits": 8}, "MLX: bits 8, group_size 64"),
        ("quantization_config", ["any"], "not named"),
        ("compression_config", {"quant_method": "sparseml"}, "sparseml"),
    ],
)
def test_a_config_names_the_method(tmp_path: Path, key: str, value: Any, method: str) -> None:
    told = refusal(tmp_path, {}, **{key: value})
    assert f"config.json: the weights are quantized ({key}, method {method}), which" in told
    assert told.endswith(OTHER)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt: quant_algo FP8",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            "modelopt: kv_cache_quant_algo FP8",
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq: bits 4, group_size 128"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "awq: w_bit 4"),
    ],
)
def test_a_file_beside_the_config_names_the_method(
    tmp_path: Path, file: str, content: dict[str, Any], method: str
) -> None:
    told = refusal(tmp_path, {file: content})
    assert f"{tmp_path / file}: the weights are quantized ({file}, method {method})" in told


def test_no_version_is_recommended_that_does_not_exist(tmp_path: Path) -> None:
    """DeepSeek V3 and Kimi K2 are published in fp8."""
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    told = refusal(tmp_path, {}, **DEEPSEEK, **fp8)
    assert "version, if it has one; those that are published in fp8 alone" in told
    assert "fp8_cast_bf16.py" in told and told.endswith(", or a GGUF file of it")
    told = refusal(tmp_path, {}, architectures=["OPTForCausalLM"], **fp8)
    assert told.endswith("use the model's bfloat16 or float16 version")


def test_a_gguf_file_is_recommended_for_families_that_have_some() -> None:
    # Files of these have the names of other architectures.
    others = {
        *("GraniteMoe", "Glm4MoeLite", "IQuestCoder", "InternLM2", "InternLM3", "MiMo"),
    }
    found = {each.family for each in (*ARCHITECTURES.values(), *VARIANTS)}
    assert found | {f"{name}ForCausalLM" for name in others} == {*FAMILIES} - NOT_IN_GGUF


@pytest.mark.parametrize("value", [None, {}, False])
def test_a_config_of_numbers_is_none(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "quantization_config": value}))
    assert spec_of(read_config(tmp_path))


def test_the_architecture_is_judged_before(tmp_path: Path) -> None:
    """Its bfloat16 version would be refused as well."""
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    told = refusal(tmp_path, {}, architectures=["JambaForCausalLM"], **mxfp4)
    assert "quantized" not in told and "supported: " in told
