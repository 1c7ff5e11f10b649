"""The same model under the names of another family, of an older one or of newer code: checkpoints
that no class of transformers reads compute what the one that does is tested to compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tandem.tests.shared.models.test_parity import prompt_of
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.ranks import build_ranks

LENGTH, MAX_TOKENS = 33, 8
Weights = dict[str, torch.Tensor]


def logits_of(folder: Path, ranks: int = 1) -> torch.Tensor:
    """After a prompt, and after each of the greedy tokens that follow."""
    return build_ranks(folder, ranks).draw(prompt_of(LENGTH), MAX_TOKENS, list(range(1, 12)))


def renamed(weights: Weights, names: dict[str, str]) -> Weights:
    """Weights under other names, which are replaced part by part."""
    results = {}
    for name, value in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        results[name] = value
    return results


def exaone(config: dict[str, Any], weights: Weights) -> Weights:
    config["num_layers"] = config.pop("num_hidden_layers")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config["activation_function"] = config.pop("hidden_act")
    table = config.pop("rope_parameters")
    config |= {"rope_theta": table.pop("rope_theta"), "rope_scaling": table, "embed_dropout": 0.0}
    names = {
        "model.embed_tokens.": "transformer.wte.",
        "model.norm.": "transformer.ln_f.",
        "model.layers.": "transformer.h.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn.": "attn.attention.",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    }
    return renamed(weights, names)


def internlm2(config: dict[str, Any], weights: Weights) -> Weights:
    """Of each KV head its query heads, the key head and the value head, one after the other."""
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    config["bias"] = config.pop("attention_bias")
    names = {
        "model.embed_tokens.": "model.tok_embeddings.",
        "lm_head.": "output.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "self_attn.": "attention.",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    result = renamed(weights, names)
    for query in [name for name in result if ".q_proj." in name]:
        q, k, v = (result.pop(query.replace("q_proj", f"{part}_proj")) for part in "qkv")
        each = len(q) // heads
        rows = []
        for head in range(heads):
            rows.append(q[head * each : (head + 1) * each])
            rows += [part[head * dim : (head + 1) * dim] for part in (k, v)]
        result[query.replace("q_proj", "wqkv")] = torch.cat(rows)
    return result


def internlm3(config: dict[str, Any], weights: Weights) -> Weights:
    config |= {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}
    return weights


def iquestcoder(config: dict[str, Any], weights: Weights) -> Weights:
    config |= {"clip_qkv": None, "sliding_window": None, "use_sliding_window": False}
    return weights


def mimo(config: dict[str, Any], weights: Weights) -> Weights:
    config |= {"num_nextn_predict_layers": 1, "attention_bias": True}
    first = "model.layers.0."
    unused = {name: value for name, value in weights.items() if name.startswith(first)}
    return weights | renamed(unused, {first: "model.mtp_layers.0."})


def stablelm(config: dict[str, Any], weights: Weights) -> Weights:
    table = config.pop("rope_parameters")
    config |= {"norm_eps": config.pop("layer_norm_eps"), "num_heads": config["num_attention_heads"]}
    config |= {"rope_pct": table["partial_rotary_factor"], "rope_theta": table["rope_theta"]}
    return weights


CASES: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any], Weights], Weights]]] = {
    "ExaoneForCausalLM": ("llama", {}, exaone),
    "InternLM2ForCausalLM": ("llama_dynamic", {"attention_bias": True}, internlm2),
    "InternLM3ForCausalLM": ("llama_bias", {}, internlm3),
    "IQuestCoderForCausalLM": ("llama", {"tie_word_embeddings": False}, iquestcoder),
    "MiMoForCausalLM": ("qwen2", {}, mimo),
    "StableLMEpochForCausalLM": ("stablelm", {}, stablelm),
}


@pytest.mark.parametrize("architecture", CASES)
def test_a_model_under_other_names_is_the_same(architecture: str, tmp_path: Path) -> None:
    base, changes, convert = CASES[architecture]
    tiny_models.build(base, tmp_path, **changes)
    expected = logits_of(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    weights = {
        name: value
        for each in tmp_path.glob("*.safetensors")
        for name, value in load_file(each).items()
    }
    for each in tmp_path.glob("*.safetensors*"):
        each.unlink()
    result = convert(config, weights)
    config |= {"architectures": [architecture], "model_type": "another", "auto_map": {"a": "b"}}
    file.write_text(json.dumps(config))
    save_file(
        {name: value.clone() for name, value in result.items()}, tmp_path / "model.safetensors"
    )
    assert torch.equal(logits_of(tmp_path), expected)
    for ranks in (2, 4):  # four have half of a KV head's query heads
        torch.testing.assert_close(logits_of(tmp_path, ranks), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2",
        "ernie4_5_moe",
        "glm4_moe",
        "granite_moe",
        "minimax_m2",
        "mixtral",
        "qwen2_moe",
    ],
)
def test_experts_as_newer_code_has_them_in_memory_are_the_same(
    name: str, model_root: Path, tmp_path: Path
) -> None:
    folder = tiny_models.cached(name, model_root)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    tiny_models.write_tokenizer(tmp_path)
    assert any(".gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits_of(tmp_path), logits_of(folder))
