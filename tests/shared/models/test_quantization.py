"""Quantized checkpoints are refused by their method, wherever a file names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.models.config_files import read_config
from tandem.shared.models.registry import FAMILIES, NOT_IN_GGUF, family_of, quantization_of, spec_of
from tandem.shared.models.spec import QUANTIZED
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
        ("quantization_config", {"quant_method": "quip", "bits": 4}, "quip: bits 4"),
        ("quantization_config", {"quant_method": "hqq"}, "hqq"),
        ("quantization_config", {"quant_method": "exl3", "bits": 4.5}, "exl3: bits 4.5"),
        ("quantization_config", ["any"], "not named"),
        ("quantization_config", {"bits": 4}, "not named: bits 4"),
        ("compression_config", {"quant_method": "sparseml"}, "sparseml"),
    ],
)
def test_an_unknown_method_is_named(tmp_path: Path, key: str, value: Any, method: str) -> None:
    message = refusal(tmp_path, {}, **{key: value})
    assert f"config.json: the weights are quantized ({key}, method {method}), which" in message
    assert message.endswith(OTHER)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config: fmt is 'e5m2'; supported: "),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "outputs is 0; supported: a pos"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits is 5; supported: 2 or 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; supported: a pos"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is True"),
        ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, "sym is 'yes'; supported: true or fal"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; supported: 'g"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'; sup"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "2:4"}},
            "sparsity_config: format is '2:4'; supported: 'dense'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            "config_groups: g: weights: num_bits is 3; supported: 4 or 8",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp3"},
            "bnb_4bit_quant_type is 'fp3'; supported: 'nf4' or 'fp4'",
        ),
        ({"bits": 7, "group_size": 64}, "bits is 7; supported: 2 or 3 or 4 or 5 or 6 or 8"),
        ({"bits": 4, "group_size": 64, "mode": "nvfp4"}, "mode is 'nvfp4'; supported: 'affine' or"),
        (
            {"bits": 4, "group_size": 64, "lm_head": {"bits": 4, "group_size": 7}},
            "lm_head: group_size is 7; supported: 16 or 32",
        ),
    ],
)
def test_a_value_of_a_method_is_named(tmp_path: Path, value: Any, words: str) -> None:
    message = refusal(tmp_path, {}, quantization_config=value)
    assert f"{tmp_path / 'config.json'}: quantization_config: " in message and words in message


def test_a_file_beside_the_config_is_read(tmp_path: Path) -> None:
    files = {"hf_quant_config.json": {"quantization": {"quant_algo": "INT4_AWQ"}}}
    message = refusal(tmp_path, files)
    assert f"{tmp_path / 'hf_quant_config.json'}: quant_algo is 'INT4_AWQ'" in message


@pytest.mark.parametrize(
    ("files", "changes", "method"),
    [
        ({}, {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fp8"),
        ({}, {"quantization_config": {"quant_algo": "FP8"}}, "modelopt"),
        ({}, {"quantization": {"group_size": 64, "bits": 8}}, "mlx"),
        ({"quantize_config.json": {"bits": 4, "group_size": 128}}, {}, "gptq"),
        ({"quant_config.json": {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}}, {}, "awq"),
        ({"hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, {}, "none"),
    ],
)
def test_a_method_is_found(
    tmp_path: Path, files: dict[str, Any], changes: dict[str, Any], method: str
) -> None:
    for name, content in {"config.json": {**BASE, **changes}, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = read_config(tmp_path)
    result = quantization_of(config)
    assert result is not None and result.method == method
    assert (spec_of(config).dtype == QUANTIZED) == (method != "none")


def test_no_version_is_recommended_that_does_not_exist(tmp_path: Path) -> None:
    quip = {"quantization_config": {"quant_method": "quip"}}
    assert refusal(tmp_path, {}, **DEEPSEEK, **quip).endswith(", or a GGUF file of it")
    message = refusal(tmp_path, {}, architectures=["OPTForCausalLM"], **quip)
    assert message.endswith("use the model's bfloat16 or float16 version")


def test_a_gguf_file_is_recommended_for_families_that_have_some() -> None:
    # Files of these have the names of other architectures.
    others = {
        *(
            "Gemma4Unified",
            "GraniteMoe",
            "Glm4MoeLite",
            "IQuestCoder",
            "InternLM2",
            "InternLM3",
            "MiMo",
        ),
    }
    names = [each.family for each in (*ARCHITECTURES.values(), *VARIANTS)]
    result = {family_of({"architectures": [name]}).architecture for name in names}
    result |= {f"{name}ForCausalLM" for name in others} | {"RobertaModel", "XLMRobertaModel"}
    assert result == {*FAMILIES} - NOT_IN_GGUF


@pytest.mark.parametrize("value", [None, {}, False])
def test_a_config_of_numbers_is_none(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "quantization_config": value}))
    assert spec_of(read_config(tmp_path))


def test_the_architecture_is_judged_before(tmp_path: Path) -> None:
    """Its bfloat16 version would be refused as well."""
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    message = refusal(tmp_path, {}, architectures=["JambaForCausalLM"], **mxfp4)
    assert "quantized" not in message and "supported: " in message
