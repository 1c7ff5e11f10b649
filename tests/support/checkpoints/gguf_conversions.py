"""What llama.cpp's converter does to the tensors and the configuration of each family, beyond
renaming, in tests' own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch

Weights = dict[str, torch.Tensor]

# Metadata by the architecture's own prefix: the keys of a config that are copied.
_COPIED = {
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_WINDOWED = ("cohere2", "exaone4", "gpt_oss", "olmo3")
_ROTATED_IN_PART = ("glm", "glm4", "glm4_moe", "gpt_neox", "phi", "stablelm", "minimax_m2")


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of families that have no place in the common part."""
    family = config["model_type"]
    values = {theirs: config.get(ours) for ours, theirs in _COPIED.items() if ours in config}
    if family in _LATENT:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "rope.dimension_count": rotated,
            "expert_weights_norm": bool(config.get("norm_topk_prob", False)),
        }
    if family in _WINDOWED:
        values["attention.sliding_window"] = config.get("sliding_window")
    if family in ("exaone4", "olmo3"):
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", kinds)
    if family == "glm4_moe":
        values["expert_gating_func"] = 2
        values["nextn_predict_layers"] = 0
        values["expert_weights_norm"] = True
    if family in _ROTATED_IN_PART:
        rope = config["rope_parameters"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values["rope.dimension_count"] = int(dim * rope.get("partial_rotary_factor", 1.0))
    if family == "gemma4_text":
        values |= _of_gemma4(writer, config)
    rope = config["rope_parameters"]
    if family in (*_LATENT, "ministral3") and (multiplier := rope.get("mscale_all_dim")):
        divisor = 10 if family in _LATENT else 1
        values["rope.scaling.yarn_log_multiplier"] = multiplier / divisor
    values["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    for key, value in values.items():
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)


def _of_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    (wide, *_) = (config.get("per_layer_config") or {"": config}).values()
    writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", windowed)
    if config.get("use_double_wide_mlp"):
        width = config["intermediate_size"]
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
        writer.add_feed_forward_length([width] * (layers - shared) + [2 * width] * shared)
    if "num_key_value_heads" in wide:
        own, others = config["num_key_value_heads"], wide["num_key_value_heads"]
        writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
        writer.add_head_count_kv([own if window else others for window in windowed])
    dim = wide["head_dim"]
    rotated = int(dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
    experts = config.get("num_experts")
    return {
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "rope.dimension_count": dim,
        "rope.dimension_count_swa": config["head_dim"],
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": experts,
        "expert_used_count": config.get("top_k_experts") if experts else None,
    }


def with_usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    """GPT-2's configuration under the keys of the others."""
    if config["model_type"] != "gpt2":
        return config
    usual = {
        "hidden_size": config["n_embd"],
        "intermediate_size": config.get("n_inner") or 4 * config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_head"],
        "max_position_embeddings": config["n_positions"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config | usual


def converted(weights: Weights, config: dict[str, Any]) -> Weights:
    """The weights with fused ones taken apart, or put together. Names that begin with ``blk.`` are
    those of the file."""
    change = _CHANGES.get(config["model_type"])
    return weights if change is None else change(weights, config)


def _each(weights: Weights, change: Callable[[str, torch.Tensor], Weights | None]) -> Weights:
    """Weights, each of which a function may replace by others."""
    result: Weights = {}
    for name, weight in weights.items():
        others = change(name, weight)
        result |= {name: weight} if others is None else others
    return result


def _gpt2(weights: Weights, config: dict[str, Any]) -> Weights:
    matrices = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return _each(weights, lambda name, w: {name: w.T} if name.endswith(matrices) else None)


def _gpt_neox(weights: Weights, config: dict[str, Any]) -> Weights:
    heads = config["num_attention_heads"]

    def change(name: str, weight: torch.Tensor) -> Weights | None:
        if ".query_key_value." not in name:
            return None
        rows = weight.unflatten(0, (heads, 3, -1))
        return {name: torch.cat([rows[:, part].flatten(0, 1) for part in range(3)])}

    return _each(weights, change)


def _latent(weights: Weights, config: dict[str, Any]) -> Weights:
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def change(name: str, weight: torch.Tensor) -> Weights | None:
        if "kv_b_proj" in name:
            layer = name.split(".")[2]
            rows = weight.unflatten(0, (heads, -1))
            return {
                f"blk.{layer}.attn_k_b.weight": rows[:, :nope].mT.contiguous(),
                f"blk.{layer}.attn_v_b.weight": rows[:, nope:].contiguous(),
            }
        return _correction(name, weight)

    return _each(weights, change)


def _correction(name: str, weight: torch.Tensor) -> Weights | None:
    if not name.endswith("e_score_correction_bias"):
        return None
    return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": weight}


def _corrected(weights: Weights, config: dict[str, Any]) -> Weights:
    return _each(weights, _correction)


def _gpt_oss(weights: Weights, config: dict[str, Any]) -> Weights:
    def change(name: str, weight: torch.Tensor) -> Weights | None:
        if name.endswith(".sinks"):
            return {f"{name}.weight": weight}
        stem, _, part = name.partition(".mlp.experts.")
        names = f"blk.{stem.rpartition('.')[2]}.ffn_{{}}_exps.{{}}"
        kind = "bias" if part.endswith("_bias") else "weight"
        weight = weight if kind == "bias" or not part else weight.mT
        if part.startswith("gate_up_proj"):
            gate, up = weight[:, 0::2], weight[:, 1::2]
            return {names.format("gate", kind): gate, names.format("up", kind): up}
        return {names.format("down", kind): weight} if part else None

    return _each(weights, change)


def _granite_moe(weights: Weights, config: dict[str, Any]) -> Weights:
    def change(name: str, weight: torch.Tensor) -> Weights | None:
        names = f"blk.{name.partition('.layers.')[2].partition('.')[0]}.ffn_{{}}_{{}}.weight"
        for place, kind in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
            if f"{place}.input_linear" in name:
                gate, up = weight.chunk(2, dim=-2)
                return {names.format("gate", kind): gate, names.format("up", kind): up}
            if f"{place}.output_linear" in name:
                return {names.format("down", kind): weight}
        return None

    return _each(weights, change)


def _stablelm(weights: Weights, config: dict[str, Any]) -> Weights:
    stacked: dict[str, list[tuple[int, torch.Tensor]]] = {}
    rest = {}
    for name, weight in weights.items():
        stem, marked, head = name.partition("_layernorm.norms.")
        if not marked:
            rest[name] = weight
            continue
        layer, part = stem.split(".")[2], stem.rpartition(".")[2]
        target = f"blk.{layer}.attn_{part}_norm.weight"
        stacked.setdefault(target, []).append((int(head.partition(".")[0]), weight))
    return rest | {
        name: torch.stack([weight for _, weight in sorted(parts, key=lambda each: each[0])])
        for name, parts in stacked.items()
    }


def _gemma4(weights: Weights, config: dict[str, Any]) -> Weights:
    ends = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }

    def change(name: str, weight: torch.Tensor) -> Weights | None:
        layer, _, rest = name.partition(".layers.")[2].partition(".")
        return {f"blk.{layer}.{ends[rest]}": weight} if rest in ends else None

    return _each(weights, change)


_CHANGES: dict[str, Callable[[Weights, dict[str, Any]], Weights]] = {
    "gemma4_text": _gemma4,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granitemoeshared": _granite_moe,
    "granitemoe": _granite_moe,
    "stablelm": _stablelm,
    "ernie4_5_moe": _corrected,
    "minimax_m2": _corrected,
    "glm4_moe": _corrected,
    **dict.fromkeys(_LATENT, _latent),
}
