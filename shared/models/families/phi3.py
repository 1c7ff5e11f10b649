"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, and heads that are rotated in part."""

from __future__ import annotations

from ..config import Config, read_rope, read_window
from ..spec import DecoderSpec
from ..weight_names import Split, WeightNames
from .dense import DENSE_WEIGHTS, read_attention, read_dense

_LAYER = "layers.{i}."
WEIGHTS: WeightNames = DENSE_WEIGHTS | {
    "model.layers.{i}.self_attn.qkv_proj.weight": Split(
        tuple(f"{_LAYER}attention.{part}.weight" for part in "qkv")
    ),
    "model.layers.{i}.mlp.gate_up_proj.weight": Split(
        tuple(f"{_LAYER}mlp.{part}.weight" for part in ("gate", "up"))
    ),
}


def read(config: Config) -> DecoderSpec:
    """Read a config. Some have a window as long as the context."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.one_of(key, (False,), False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.one_of(key, (1,), 1)
    config.get("original_max_position_embeddings")
    layers = config.integer("num_hidden_layers")
    attention = read_attention(config)
    rope = read_rope(config, attention.head_dim, partial=True)
    windows = [read_window(config)] * layers
    return read_dense(config, attention, windows=windows, ropes=[rope] * layers, norm_eps=1e-5)
