"""GLM-4 and GLM-4-0414: heads of which half is rotated, in pairs of neighbours, and fused gates;
0414 has norms before and after both halves of a layer."""

from __future__ import annotations

from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, NormLayout
from ..weight_names import Split, WeightNames, per_layer, rotary_projections
from .dense import DENSE_WEIGHTS, QKV_BIAS, read_attention, read_dense

GLM_WEIGHTS: WeightNames = (
    DENSE_WEIGHTS
    | QKV_BIAS
    | rotary_projections("q", "k")
    | {
        "model.layers.{i}.mlp.gate_up_proj.weight": Split(
            ("layers.{i}.mlp.gate.weight", "layers.{i}.mlp.up.weight")
        )
    }
)
WEIGHTS: WeightNames = GLM_WEIGHTS | per_layer(
    {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_mlp_norm",
    }
)


def read_glm(config: Config) -> DecoderSpec:
    """Read a config of GLM-4."""
    return _read(config, NormLayout.PRE)


def read(config: Config) -> DecoderSpec:
    """Read a config of GLM-4-0414."""
    return _read(config, NormLayout.SANDWICH)


def _read(config: Config, norms: NormLayout) -> DecoderSpec:
    attention = read_attention(config, qkv_bias=config.flag("attention_bias", True))
    windows = read_full_attention(config)
    rope = read_rope(config, attention.head_dim, partial=True, part=0.5)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        norms=norms,
        norm_eps=1.5625e-07,
    )
