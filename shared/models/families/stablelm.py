"""StableLM 1 and 2: LayerNorms, heads that are rotated in part, and in the 12B model parallel
halves and a LayerNorm for each head."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, NormKind, NormLayout, QKNorm
from ..weight_names import WeightNames, per_layer
from .dense import DENSE_WEIGHTS, QKV_BIAS, read_attention, read_dense

WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | QKV_BIAS
    | {"model.norm.bias": "norm.bias"}
    | per_layer(
        {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
        kinds=("bias",),
    )
    | per_layer(
        {
            "self_attn.q_layernorm.norms.{j}": "attention.q_norm.{j}",
            "self_attn.k_layernorm.norms.{j}": "attention.k_norm.{j}",
        }
    )
)


def read(config: Config) -> DecoderSpec:
    """Read a config. The first ones have other names for some keys, or further ones."""
    has_norm, parallel = config.flag("qk_layernorm"), config.flag("use_parallel_residual")
    attention = read_attention(
        config,
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm=QKNorm.LAYER if has_norm else None,
    )
    windows = read_full_attention(config)
    heads = attention.num_heads
    config.one_of("num_heads", (heads,), heads)
    config.one_of("rotary_scaling_factor", (1,), 1)
    rope = read_rope(config, attention.head_dim, partial=True, part=config.number("rope_pct", 0.25))
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        norms=NormLayout.PARALLEL_SHARED if parallel else NormLayout.PRE,
        norm=NormKind.LAYER,
        eps_key="layer_norm_eps",
        norm_eps=config.number("norm_eps", 1e-5),
    )
