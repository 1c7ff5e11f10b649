"""MiniMax M2: norms over all heads of q and of k, partly rotated heads, and experts chosen by
corrected sigmoids."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, DenseSpec, MoESpec, QKNorm, RouterSpec
from ..weight_names import WeightNames
from . import mixtral
from .dense import QK_NORM, read_attention, read_dense

WEIGHTS: WeightNames = (
    mixtral.WEIGHTS
    | QK_NORM
    | {
        f"model.layers.{{i}}.{place}.e_score_correction_bias": "layers.{i}.mlp.router.bias"
        for place in ("block_sparse_moe", "mlp")
    }
)
# About training, layers that predict further tokens, and other models of the same code.
_NO_EFFECT = (
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "router_jitter_noise",
    "shared_moe_mode",
    "use_mtp",
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("hidden_act", ("silu",), "silu")
    config.one_of("scoring_func", ("sigmoid",), "sigmoid")
    config.one_of("use_routing_bias", (True,), True)
    config.one_of("qk_norm_type", ("per_layer",), "per_layer")
    config.one_of("shared_intermediate_size", (0,), 0)
    kinds = config.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) != {1}):
        raise config.refusal("attn_type_list", kinds, "ones only, which are full attention")
    for key in _NO_EFFECT:
        config.get(key)
    windows = read_full_attention(config)
    attention = read_attention(config, qk_norm=QKNorm.PROJECTION)
    rotary_dim = config.integer("rotary_dim", attention.head_dim)
    rope = read_rope(
        config,
        attention.head_dim,
        partial=True,
        part=rotary_dim / attention.head_dim,
        theta=5_000_000.0,
    )
    experts = config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok", at_most=experts)
    mlp = MoESpec(
        router=RouterSpec(experts=experts, top_k=top_k, scoring="sigmoid", correction=True),
        expert=DenseSpec(intermediate=config.integer("intermediate_size")),
    )
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        mlps=[mlp] * len(windows),
    )
