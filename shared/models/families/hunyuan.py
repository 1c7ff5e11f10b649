"""Hunyuan's dense models: a norm over each head of q and k after the rotation."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec, QKNorm
from ..weight_names import WeightNames, per_layer
from . import llama
from .dense import read_attention, read_dense

WEIGHTS: WeightNames = llama.WEIGHTS | per_layer(
    {
        "self_attn.query_layernorm": "attention.q_norm",
        "self_attn.key_layernorm": "attention.k_norm",
    }
)


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    config.one_of("use_qk_norm", (True,), True)
    config.one_of("use_cla", (False,), False)
    for key in ("attention_head_dim", "eod_token_id", "pad_id", "sep_token_id", "cla_share_factor"):
        config.get(key)
    for key in ("org_vocab_size", "norm_type", "anyres_pooling_size", "anyres_vit_max_image_size"):
        config.get(key)
    bias = config.flag("attention_bias")
    return read_dense(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.ROTATED_HEAD),
        windows=read_full_attention(config),
        norm_eps=1e-5,
    )
