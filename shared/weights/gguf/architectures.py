"""Architectures of GGUF files: the family of each, its metadata as keys of a ``config.json``, and
its tensors. No torch.

llama.cpp's converter stores tensors of some families differently from Hugging Face: the rotated
rows of q and k in pairs, norms with one added, the experts of a layer in one tensor. Some values of
a config follow from the presence of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...models.config_files import PROJECTIONS
from ...models.weight_names import Deinterleave, Split, Stacked, WeightNames
from .header import GGUFHeader

# From metadata without the architecture's prefix and the header to config values, which replace
# others.
Derive = Callable[[Mapping[str, Any], GGUFHeader], Mapping[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """``family`` is the entry in ``architectures`` of a config.json. ``keys`` are the config's
    names of metadata, without the architecture's prefix; ``constants`` are values that the metadata
    leaves out. ``ignored_keys`` are metadata that follow from other values or tensors, or that
    ``derive`` reads. ``rotated_part`` is the config's key for partly rotated heads. ``scaling`` is
    added to a table that scales rope, ``stretch`` is the ratio of a config's ``mscale`` to the
    file's, and ``ropes`` converts values for families with other rope tables. ``None`` values are
    left out."""

    family: str
    keys: Mapping[str, str]
    weights: WeightNames
    constants: Mapping[str, Any] = field(default_factory=dict)
    ignored_keys: frozenset[str] = frozenset()
    rotated_part: str | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    stretch: float = 1.0
    ropes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    derive: Derive = lambda metadata, header: {}


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
LOCAL_THETA = "rope_local_base_freq"
# Far above any real factor of a frequency.
_NOT_ROTATED = 1e9
_QUERY_GROWTH = "query growth"
_LOCAL = {
    "rope.freq_base_swa": LOCAL_THETA,
    "attention.sliding_window_pattern": "sliding_window_pattern",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# About positions in images, and the layers after which images are added.
_OF_IMAGES = frozenset(("rope.dimension_sections", "n_deepstack_layers"))
# The epsilon of LayerNorms, under the key of most families.
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def _in_layers(names: Mapping[str, str], kind: str = "weight") -> WeightNames:
    return {
        f"blk.{{i}}.{theirs}.{kind}": f"layers.{{i}}.{ours}.{kind}"
        for theirs, ours in names.items()
    }


def _rotary_projections(names: Mapping[str, str]) -> WeightNames:
    """Weights and biases of projections whose rotated rows are stored in pairs."""
    return {
        f"blk.{{i}}.{theirs}.{kind}": Deinterleave(f"layers.{{i}}.{ours}.{kind}")
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    }


_QK = {"attn_q": "attention.q", "attn_k": "attention.k"}
_PROJECTIONS = _QK | {
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_NORMS = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
_SANDWICH = _NORMS | {
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_mlp_norm",
}
_HEAD_NORMS = {"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"}
_DENSE: WeightNames = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    # Rope factors, which the config reads from the file.
    "rope_freqs.weight": None,
    "rope_factors_long.weight": None,
    "rope_factors_short.weight": None,
    **_in_layers(_PROJECTIONS),
    **_in_layers(_PROJECTIONS, "bias"),
    **_in_layers(_NORMS),
}
_LLAMA = _DENSE | _rotary_projections(_QK)
_QWEN3 = _DENSE | _in_layers(_HEAD_NORMS)
_GEMMA = _DENSE | _in_layers(_SANDWICH)
_FUSED_QKV = {
    f"blk.{{i}}.attn_qkv.{kind}": Split(
        tuple(f"layers.{{i}}.attention.{part}.{kind}" for part in "qkv")
    )
    for kind in ("weight", "bias")
}
_FUSED_GATE: WeightNames = {
    "blk.{i}.ffn_up.weight": Split(("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight"))
}
_NORM_BIASES: WeightNames = {"output_norm.bias": "norm.bias", **_in_layers(_NORMS, "bias")}
# Norms after the halves of a layer only.
_POST_NORMS = _in_layers(
    {"post_attention_norm": "post_attention_norm", "post_ffw_norm": "post_mlp_norm"}
)
# A norm that is named after the preceding half.
_NORM_OF_MLP = _in_layers({"post_attention_norm": "mlp_norm"})
_PARTS = ("gate", "up", "down")
_EXPERT_WEIGHTS: WeightNames = _in_layers({"ffn_gate_inp": "mlp.router"}) | {
    f"blk.{{i}}.ffn_{part}_exps.{{j}}.weight": f"layers.{{i}}.mlp.experts.{{j}}.{part}.weight"
    for part in _PARTS
}
_SHARED_EXPERT = _in_layers({f"ffn_{part}_shexp": f"mlp.shared.{part}" for part in _PARTS})
_CORRECTION: WeightNames = {"blk.{i}.exp_probs_b.bias": "layers.{i}.mlp.router.bias"}
_MOE: WeightNames = _QWEN3 | _EXPERT_WEIGHTS
_BERT: WeightNames = {
    "token_embd.weight": "embed.weight",
    "position_embd.weight": "positions.weight",
    "token_types.weight": "segments.weight",
    **{
        name: weight
        for kind in ("weight", "bias")
        for name, weight in {
            f"token_embd_norm.{kind}": f"embedding_norm.{kind}",
            **_in_layers(
                {name: to for name, to in _PROJECTIONS.items() if name != "ffn_gate"}
                | {
                    "attn_output_norm": "post_attention_norm",
                    "layer_output_norm": "post_mlp_norm",
                },
                kind,
            ),
        }.items()
    },
}
# Heads that score or label texts.
CLASSIFIER_WEIGHTS: WeightNames = {
    f"{theirs}.{kind}": f"classifier.{ours}.{kind}"
    for theirs, ours in (("cls", "dense"), ("cls.norm", "norm"), ("cls.output", "out"))
    for kind in ("weight", "bias")
}
_MODERN_BERT: WeightNames = (
    {
        "token_embd.weight": "embed.weight",
        "token_embd_norm.weight": "embedding_norm.weight",
        "output_norm.weight": "norm.weight",
        # The head for masked language modelling, in models without a classifier.
        "cls.weight": None,
        "cls.norm.weight": None,
        **_in_layers(_NORMS),
        **_in_layers({"attn_output": "attention.o", "ffn_down": "mlp.down"}),
    }
    | _FUSED_QKV
    | _FUSED_GATE
)
# Names from before experts were stacked.
_MIXTRAL: WeightNames = (
    _LLAMA
    | _EXPERT_WEIGHTS
    | {
        f"blk.{{i}}.ffn_{part}.{{j}}.weight": f"layers.{{i}}.mlp.experts.{{j}}.{part}.weight"
        for part in _PARTS
    }
)
_DEEPSEEK: WeightNames = (
    _DENSE
    | _in_layers(
        {
            "attn_q_a": "attention.q_a",
            "attn_q_a_norm": "attention.q_a_norm",
            "attn_kv_a_norm": "attention.kv_a_norm",
            "attn_kv_b": "attention.kv_b",
        }
    )
    | _rotary_projections(
        {
            "attn_q": "attention.q",
            "attn_q_b": "attention.q_b",
            "attn_kv_a_mqa": "attention.kv_a",
        }
    )
    | _EXPERT_WEIGHTS
    | _SHARED_EXPERT
    | _CORRECTION
)
_GEMMA4: WeightNames = (
    _GEMMA
    | _in_layers(_HEAD_NORMS)
    | _in_layers(
        {
            "layer_output_scale": "output_scale",
            "inp_gate": "token_gate.gate",
            "proj": "token_gate.down",
            "post_norm": "token_gate.norm",
            "ffn_gate_inp": "mlp.router",
            "pre_ffw_norm_2": "mlp.experts_norm",
            "post_ffw_norm_1": "mlp.post_shared_norm",
            "post_ffw_norm_2": "mlp.post_experts_norm",
        }
    )
    | {
        "per_layer_token_embd.weight": "token_inputs.table.weight",
        "per_layer_model_proj.weight": "token_inputs.projection.weight",
        "per_layer_proj_norm.weight": "token_inputs.norm.weight",
        "blk.{i}.ffn_gate_inp.scale": "layers.{i}.mlp.router.norm.weight",
        "blk.{i}.ffn_down_exps.scale": "layers.{i}.mlp.router.expert_scale.weight",
        "blk.{i}.ffn_gate_up_exps.{j}.weight": Split(
            (
                "layers.{i}.mlp.experts.{j}.gate.weight",
                "layers.{i}.mlp.experts.{j}.up.weight",
            )
        ),
        "blk.{i}.ffn_down_exps.{j}.weight": "layers.{i}.mlp.experts.{j}.down.weight",
    }
)
# Linear layers over a text's vector, by their places among sentence-transformers' modules.
_VECTOR_LAYERS = ("dense_2", "dense_3")
# A LayerNorm for each head.
_STACKED_HEAD_NORMS: WeightNames = {
    "blk.{i}.attn_q_norm.weight": Stacked("layers.{i}.attention.q_norm.{j}.weight", "heads"),
    "blk.{i}.attn_k_norm.weight": Stacked("layers.{i}.attention.k_norm.{j}.weight", "kv_heads"),
}
_COHERE: WeightNames = _LLAMA | {
    "blk.{i}.attn_q_norm.weight": Stacked(
        Deinterleave("layers.{i}.attention.q_norm.{j}.weight"), "heads"
    ),
    "blk.{i}.attn_k_norm.weight": Stacked(
        Deinterleave("layers.{i}.attention.k_norm.{j}.weight"), "kv_heads"
    ),
}
_EXPERT_BIASES: WeightNames = {
    f"blk.{{i}}.ffn_{part}_exps.bias": Stacked(f"layers.{{i}}.mlp.experts.{{j}}.{part}.bias")
    for part in _PARTS
}


def _has(name: str, header: GGUFHeader) -> bool:
    """True if the first layer has a tensor."""
    return f"blk.0.{name}" in header.tensors


def _with_q_bias(key: str) -> Derive:
    return lambda metadata, header: {key: _has("attn_q.bias", header)}


def _qk_normed(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return {"use_qk_norm": _has("attn_q_norm.weight", header)}


def _of_stablelm(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return {
        "use_qkv_bias": _has("attn_q.bias", header),
        "qk_layernorm": _has("attn_q_norm.weight", header),
        "use_parallel_residual": not _has("ffn_norm.weight", header),
    }


_POOLINGS_OF_CLASSIFIERS = {1: "mean", 2: "cls"}
# Families that always have biases, or have another key for them.
_NO_BIASES = {"attention_bias": None, "mlp_bias": None}
# Keys that configs of encoders lack.
_NOT_IN_ENCODERS = dict.fromkeys(
    ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_theta", "is_causal")
)


def _of_phi(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The width of the feed-forward, which the converter leaves out."""
    up = header.tensors.get("blk.0.ffn_up.weight")
    return _NO_BIASES | {"intermediate_size": None if up is None else up.shape[0]}


def _of_bert(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The sizes of tables. RoBERTa's positions lack the unused rows, which makes it a BERT."""
    tables = {
        "max_position_embeddings": header.tensors.get("position_embd.weight"),
        "type_vocab_size": header.tensors.get("token_types.weight"),
    }
    sizes = {key: None if table is None else table.shape[0] for key, table in tables.items()}
    return _NO_BIASES | _NOT_IN_ENCODERS | {"bos_token_id": None} | sizes


def _of_modern_bert(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The kinds of layers, which are all the same without a window, and the pooling of a
    classifier, by default the mean."""
    values: dict[str, Any] = _NO_BIASES | _NOT_IN_ENCODERS
    if not metadata.get("attention.sliding_window"):
        values |= {"local_attention": None, "global_attn_every_n_layers": 1}
    elif kinds := _kinds_by_window(metadata, header):
        values |= {"global_attn_every_n_layers": None, **kinds}
    pooling = metadata.get("classifier.pooling_type", 1)
    if isinstance(pooling, int):
        pooling = _POOLINGS_OF_CLASSIFIERS.get(pooling, pooling)
    return values | {
        "classifier_pooling": pooling,
        "classifier_bias": "cls.bias" in header.tensors,
    }


def _of_gpt2(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return _NO_BIASES | dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta"))


def _of_neox(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return _NO_BIASES | {"attention_bias": _has("attn_qkv.bias", header)}


def _of_seed_oss(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return {
        "attention_bias": _has("attn_q.bias", header),
        "attention_out_bias": _has("attn_output.bias", header),
    }


def _of_starcoder2(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return _NO_BIASES | {"use_bias": _has("attn_q.bias", header)}


def _kinds_by_window(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """``layer_types``, if a file lists the layers with a window."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    return {"layer_types": kinds}


def _of_minimax(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    return {"rotary_dim": metadata.get("rope.dimension_count")}


def _of_glm4_moe(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """Subtract layers that predict further tokens, which a file counts as layers."""
    layers, more = metadata.get("block_count"), metadata.get("nextn_predict_layers", 0)
    are_integers = isinstance(layers, int) and isinstance(more, int)
    return {
        "num_hidden_layers": layers - more if are_integers else layers,
        "attention_bias": _has("attn_q.bias", header),
        **_qk_normed(metadata, header),
    }


def _of_deepseek(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The widths of heads, which older files lack for latent attention."""
    rope_dim = metadata.get("rope.dimension_count")
    width = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    are_integers = isinstance(rope_dim, int) and isinstance(width, int)
    heads = metadata.get("attention.head_count")
    groups = metadata.get("expert_group_count", 1)
    values: dict[str, Any] = {
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": width - rope_dim if are_integers else width,
        "v_head_dim": metadata.get(
            "attention.value_length_mla", metadata.get("attention.value_length")
        ),
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "n_group": groups,
        "topk_group": metadata.get("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
    }
    return values


def _of_deepseek_v2(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    has_groups = metadata.get("expert_group_count", 1) != 1
    method = "group_limited_greedy" if has_groups else "greedy"
    normalise = metadata.get("expert_weights_norm", False)
    return {
        **_of_deepseek(metadata, header),
        "topk_method": method,
        "norm_topk_prob": normalise,
    }


def _of_deepseek_v3(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    normalise = metadata.get("expert_weights_norm", True)
    return {**_of_deepseek(metadata, header), "norm_topk_prob": normalise}


def _of_gemma4(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """Values that follow from lists by layer, and from missing tensors."""
    kinds = _kinds_by_window(metadata, header).get("layer_types", [])
    heads, widths = metadata.get("attention.head_count_kv"), metadata.get("feed_forward_length")
    table = header.tensors.get("per_layer_token_embd.weight")
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    values: dict[str, Any] = {
        "layer_types": kinds or None,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": "expert_count" in metadata,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in header.tensors,
    }
    if isinstance(heads, list) and len(heads) == len(kinds):
        of_kind = dict(zip(kinds, heads, strict=True))
        values["num_key_value_heads"] = of_kind.get("sliding_attention")
        values["num_global_key_value_heads"] = of_kind.get("full_attention")
    if isinstance(widths, list) and widths:
        values |= {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0]}
    return values


def _of_gemma3(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The kinds of layers, by a period or a list."""
    kinds = _kinds_by_window(metadata, header)
    return {**kinds, "sliding_window_pattern": None} if kinds else {}


def _of_gemma_embedding(metadata: Mapping[str, Any], header: GGUFHeader) -> Mapping[str, Any]:
    """The kinds of layers, and the linear layers over a text's vector if they were converted too,
    with the widths of their tensors."""
    layers = [header.tensors.get(f"{name}.weight") for name in _VECTOR_LAYERS]
    return {
        "is_causal": None,
        PROJECTIONS: [
            {
                "in_features": layer.shape[-1],
                "out_features": layer.shape[0],
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
            for layer in layers
            if layer is not None
        ],
        **_of_gemma3(metadata, header),
    }


def _ropes_of_gemma4(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """In layers without a window, the last dimensions are not rotated: their factors are huge."""
    factors = values.get("rope_scaling", {}).get("long_factor") or [1.0]
    part = sum(factor < _NOT_ROTATED for factor in factors) / len(factors)
    full = {
        "rope_type": "proportional",
        "rope_theta": values.get("rope_theta"),
        "partial_rotary_factor": part,
    }
    local = {"rope_type": "default", "rope_theta": values.get(LOCAL_THETA)}
    tables = {"full_attention": full, "sliding_attention": local}
    return {"rope_parameters": tables} | dict.fromkeys(("rope_theta", "rope_scaling", LOCAL_THETA))


def _rope_table(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """One table with the rope and the growth of queries."""
    table = {"rope_theta": values.get("rope_theta"), **values.get("rope_scaling", {})}
    table["llama_4_scaling_beta"] = values.get(_QUERY_GROWTH)
    return {"rope_parameters": table} | dict.fromkeys(("rope_theta", "rope_scaling", _QUERY_GROWTH))


def _ropes_by_kind(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tables of the ropes with and without a window, in place of one for all layers."""
    if LOCAL_THETA not in values:
        return {}
    full = {"rope_theta": values.get("rope_theta"), **values.get("rope_scaling", {})}
    local = {"rope_theta": values[LOCAL_THETA]}
    tables = {"full_attention": full, "sliding_attention": local}
    table = {kind: {"rope_type": "default"} | rope for kind, rope in tables.items()}
    return {"rope_parameters": table} | dict.fromkeys(("rope_theta", "rope_scaling", LOCAL_THETA))


_DEEPSEEK_KEYS = {
    **{key: name for key, name in _KEYS.items() if key not in ("attention.key_length",)},
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
_DEEPSEEK_IMPLIED = frozenset(
    (
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_weights_scale",
    )
)
_GLM_KEYS = _KEYS | {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_GRANITE_KEYS = _KEYS | {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOCAL_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_PATTERN = frozenset(("attention.sliding_window_pattern",))
_WIDTH_OF_EXPERTS = frozenset(("expert_feed_forward_length",))

MIXTRAL = Architecture("MixtralForCausalLM", _KEYS | _LOCAL_EXPERTS, _MIXTRAL)
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    _DEEPSEEK_KEYS,
    _DEEPSEEK,
    ignored_keys=_DEEPSEEK_IMPLIED,
    stretch=10.0,
    derive=_of_deepseek_v3,
)
OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    _KEYS | _WINDOW | {"rope.freq_base_swa": LOCAL_THETA},
    _QWEN3 | _POST_NORMS,
    ignored_keys=_PATTERN,
    derive=_kinds_by_window,
    ropes=_ropes_by_kind,
)
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    _KEYS | {"attention.temperature_scale": _QUERY_GROWTH},
    _LLAMA,
    ropes=_rope_table,
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _KEYS, _LLAMA),
    "qwen2": Architecture("Qwen2ForCausalLM", _KEYS, _DENSE),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _KEYS | _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        _DENSE
        | _EXPERT_WEIGHTS
        | _SHARED_EXPERT
        | _in_layers({"ffn_gate_inp_shexp": "mlp.shared_gate"}),
        derive=_with_q_bias("qkv_bias"),
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", _KEYS, _QWEN3),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", _KEYS | _EXPERTS, _MOE, {"norm_topk_prob": True}
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM", _KEYS, _DENSE, ignored_keys=_OF_IMAGES),
    "qwen3vl": Architecture("Qwen3ForCausalLM", _KEYS, _QWEN3, ignored_keys=_OF_IMAGES),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM",
        _KEYS | _EXPERTS,
        _MOE,
        {"norm_topk_prob": True},
        ignored_keys=_OF_IMAGES,
    ),
    "gemma": Architecture("GemmaForCausalLM", _KEYS, _DENSE),
    "gemma2": Architecture("Gemma2ForCausalLM", _KEYS | _WINDOW | _SOFT_CAPS, _GEMMA),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _KEYS | _WINDOW | _SOFT_CAPS | _LOCAL,
        _GEMMA | _in_layers(_HEAD_NORMS),
        derive=_of_gemma3,
    ),
    "gemma-embedding": Architecture(
        "Gemma3TextModel",
        _KEYS | _WINDOW | _LOCAL,
        _GEMMA
        | _in_layers(_HEAD_NORMS)
        | {
            f"{theirs}.weight": f"projections.{number}.weight"
            for number, theirs in enumerate(_VECTOR_LAYERS)
        },
        {"use_bidirectional_attention": True},
        ignored_keys=frozenset(
            f"{name}_feat_{side}" for name in _VECTOR_LAYERS for side in ("in", "out")
        ),
        derive=_of_gemma_embedding,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        _KEYS
        | _WINDOW
        | _SOFT_CAPS
        | {
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "rope.freq_base_swa": LOCAL_THETA,
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        _GEMMA4,
        ignored_keys=_PATTERN
        | {
            "attention.value_length",
            "attention.value_length_swa",
            "rope.dimension_count_swa",
        },
        derive=_of_gemma4,
        ropes=_ropes_of_gemma4,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        _KEYS | _LAYER_NORM,
        _DENSE | _FUSED_QKV | _NORM_BIASES | {"output.bias": "head.bias"},
        rotated_part="partial_rotary_factor",
        derive=_of_phi,
    ),
    "phi3": Architecture("Phi3ForCausalLM", _KEYS | _WINDOW, _DENSE | _FUSED_QKV | _FUSED_GATE),
    "smollm3": Architecture("SmolLM3ForCausalLM", _KEYS, _LLAMA),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK_KEYS,
        _DEEPSEEK,
        ignored_keys=_DEEPSEEK_IMPLIED,
        stretch=10.0,
        derive=_of_deepseek_v2,
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        _KEYS | _LAYER_NORM | {"logit_scale": "logit_scale"},
        _COHERE,
        derive=_qk_normed,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        _KEYS | _LAYER_NORM | _WINDOW | {"logit_scale": "logit_scale"},
        _LLAMA,
        ignored_keys=_PATTERN,
        derive=_kinds_by_window,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _KEYS, _LLAMA, derive=_with_q_bias("use_bias")),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _KEYS
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        _LLAMA
        | _EXPERT_WEIGHTS
        | _SHARED_EXPERT
        | {"blk.{i}.exp_probs_b.bias": Stacked("layers.{i}.mlp.router.bias", "one")},
        ignored_keys=frozenset(("expert_shared_feed_forward_length",)),
        derive=_with_q_bias("use_bias"),
    ),
    "exaone": Architecture(
        "ExaoneForCausalLM",
        _KEYS | {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
        _DENSE,
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        _KEYS | _WINDOW,
        _QWEN3 | _POST_NORMS,
        ignored_keys=_PATTERN,
        derive=_kinds_by_window,
    ),
    "chatglm": Architecture(
        "GlmForCausalLM",
        _KEYS,
        _LLAMA | _FUSED_GATE,
        rotated_part="partial_rotary_factor",
        derive=_with_q_bias("attention_bias"),
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        _KEYS,
        _LLAMA | _POST_NORMS | _FUSED_GATE,
        rotated_part="partial_rotary_factor",
        derive=_with_q_bias("attention_bias"),
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _GLM_KEYS,
        _QWEN3 | _NORM_OF_MLP | _EXPERT_WEIGHTS | _SHARED_EXPERT | _CORRECTION,
        ignored_keys=frozenset(("expert_gating_func",)),
        rotated_part="partial_rotary_factor",
        derive=_of_glm4_moe,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _KEYS | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        _DENSE | _FUSED_QKV | _NORM_BIASES | {"position_embd.weight": "positions.weight"},
        derive=_of_gpt2,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _KEYS
        | _LAYER_NORM
        | {
            "use_parallel_residual": "use_parallel_residual",
            "rope.freq_base": "rotary_emb_base",
        },
        _DENSE | _FUSED_QKV | _NORM_BIASES,
        rotated_part="rotary_pct",
        derive=_of_neox,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _KEYS | _WINDOW | _LOCAL_EXPERTS,
        _DENSE
        | _NORM_OF_MLP
        | _EXPERT_WEIGHTS
        | _EXPERT_BIASES
        | {
            "blk.{i}.ffn_gate_inp.bias": "layers.{i}.mlp.router.logits.bias",
            "blk.{i}.attn_sinks.weight": "layers.{i}.attention.sinks.weight",
        },
        ignored_keys=_WIDTH_OF_EXPERTS,
        scaling={"truncate": False},
    ),
    "granite": Architecture("GraniteForCausalLM", _GRANITE_KEYS, _LLAMA),
    "granitemoe": Architecture(
        "GraniteMoeSharedForCausalLM",
        _GRANITE_KEYS
        | _LOCAL_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        _LLAMA | _EXPERT_WEIGHTS | _SHARED_EXPERT,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _KEYS, _QWEN3),
    "internlm2": Architecture("LlamaForCausalLM", _KEYS, _LLAMA),
    "mistral3": Architecture(
        "MistralForCausalLM", _KEYS, _LLAMA, derive=lambda metadata, header: {"sliding_window": 0}
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        _KEYS | _LOCAL_EXPERTS,
        _QWEN3 | _EXPERT_WEIGHTS | _CORRECTION,
        ignored_keys=frozenset(("expert_gating_func", "expert_feed_forward_length")),
        derive=_of_minimax,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _KEYS, _QWEN3 | _POST_NORMS),
    "bert": Architecture("BertModel", _KEYS | _LAYER_NORM, _BERT, derive=_of_bert),
    "modern-bert": Architecture(
        "ModernBertModel",
        _KEYS
        | {
            # The converter writes the same number under both keys.
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "hidden_activation": "hidden_activation",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        _MODERN_BERT,
        ignored_keys=frozenset(("classifier.pooling_type",)),
        derive=_of_modern_bert,
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", _KEYS, _DENSE | _NORM_OF_MLP, derive=_of_seed_oss
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        _KEYS | _LAYER_NORM,
        _DENSE | _NORM_BIASES | _STACKED_HEAD_NORMS,
        ignored_keys=frozenset(("use_parallel_residual",)),
        rotated_part="partial_rotary_factor",
        derive=_of_stablelm,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        _KEYS | {"attention.layer_norm_epsilon": "norm_epsilon"},
        _DENSE | _NORM_BIASES,
        derive=_of_starcoder2,
    ),
}
# Names that stand for several families.
VARIANTS = (MIXTRAL, DEEPSEEK_V3, OLMO3, MINISTRAL3)


def architecture(name: str, header: GGUFHeader) -> Architecture:
    """The architecture of this name. Some names stand for several families."""
    if name == "llama" and header.metadata.get("llama.expert_count", 0) != 0:
        return MIXTRAL
    has_correction = any(tensor.endswith(".exp_probs_b.bias") for tensor in header.tensors)
    sigmoids = header.metadata.get("deepseek2.expert_gating_func") == 2
    normalise = header.metadata.get("deepseek2.expert_weights_norm") is True
    if name == "deepseek2" and (has_correction or sigmoids or normalise):
        return DEEPSEEK_V3
    if name == "mistral3" and "mistral3.attention.temperature_scale" in header.metadata:
        return MINISTRAL3
    if name == "olmo2" and "olmo2.attention.sliding_window" in header.metadata:
        return OLMO3
    return ARCHITECTURES[name]
