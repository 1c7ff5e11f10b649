"""OLMo 2 and 3: norms after both halves of a layer, and over all heads of q and of k."""

from __future__ import annotations

from ..config import (
    FULL,
    SLIDING,
    Config,
    read_full_attention,
    read_rope,
    read_rope_table,
    read_windows,
)
from ..spec import AttentionSpec, DecoderSpec, NormLayout, QKNorm, RopeSpec
from ..weight_names import WeightNames, per_layer
from .dense import DENSE_WEIGHTS, O_BIAS, QK_NORM, QKV_BIAS, read_attention, read_dense

POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
WEIGHTS: WeightNames = DENSE_WEIGHTS | QKV_BIAS | O_BIAS | QK_NORM | per_layer(POST_NORMS)


def read(config: Config) -> DecoderSpec:
    """Read a config of OLMo 2."""
    windows = read_full_attention(config)
    attention = _read_attention(config)
    return read_dense(config, attention, windows=windows, norms=NormLayout.POST, norm_eps=1e-5)


def read_olmo3(config: Config) -> DecoderSpec:
    """Read a config of OLMo 3: windows in three of four layers, whose rope is never scaled."""
    layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", 4096)
    default = tuple(None if (index + 1) % 4 == 0 else window for index in range(layers))
    windows = read_windows(config, layers, default)
    attention = _read_attention(config)
    ropes = _read_ropes(config, attention.head_dim)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[ropes[SLIDING if window else FULL] for window in windows],
        norms=NormLayout.POST,
        norm_eps=1e-5,
    )


def _read_ropes(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """Tables by kind (transformers 5), or one, whose scaling is for full attention."""
    tables = config.get("rope_parameters")
    if isinstance(tables, dict) and set(tables) == {FULL, SLIDING}:
        return {
            kind: read_rope_table(config, f"rope_parameters: {kind}", table, head_dim, theta=5e5)
            for kind, table in tables.items()
        }
    rope = read_rope(config, head_dim, theta=5e5)
    return {FULL: rope, SLIDING: RopeSpec(theta=rope.theta, dim=rope.dim)}


def _read_attention(config: Config) -> AttentionSpec:
    bias = config.flag("attention_bias")
    return read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.PROJECTION)
