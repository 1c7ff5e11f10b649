"""Phi-1, Phi-1.5 and Phi-2: LayerNorms, a feed-forward without a gate beside attention, and heads
that are rotated in part."""

from __future__ import annotations

from ...errors import ModelError
from ..config import Config, read_full_attention, read_rope
from ..spec import DecoderSpec, NormKind, NormLayout
from ..weight_names import WeightNames, per_layer
from .dense import read_attention, read_dense, read_plain_mlp

_BOTH = ("weight", "bias")
WEIGHTS: WeightNames = {
    "model.embed_tokens.weight": "embed.weight",
    "model.final_layernorm.weight": "norm.weight",
    "model.final_layernorm.bias": "norm.bias",
    "lm_head.weight": "head.weight",
    "lm_head.bias": "head.bias",
    **per_layer(
        {
            "input_layernorm": "attention_norm",
            "self_attn.q_proj": "attention.q",
            "self_attn.k_proj": "attention.k",
            "self_attn.v_proj": "attention.v",
            "self_attn.dense": "attention.o",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        },
        kinds=_BOTH,
    ),
    "model.layers.{i}.self_attn.rotary_emb.inv_freq": None,
}


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    if config.get("n_embd") is not None:
        raise ModelError(
            f"{config.file}: n_embd is there instead of hidden_size, as in the first files of "
            "these models, whose weights have other names; use a version saved by transformers"
        )
    attention = read_attention(config, qkv_bias=True, o_bias=True)
    windows = read_full_attention(config)
    rope = read_rope(config, attention.head_dim, partial=True, part=0.5)
    config.one_of("rotary_dim", (rope.dim,), rope.dim)
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope] * len(windows),
        mlps=[read_plain_mlp(config, "gelu_new")] * len(windows),
        norms=NormLayout.PARALLEL_SHARED,
        norm=NormKind.LAYER,
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
        head_bias=True,
    )
