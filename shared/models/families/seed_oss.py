"""Seed-OSS: Llama with separate switches for the biases of attention."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec
from .dense import read_attention, read_dense, read_mlp
from .llama import WEIGHTS as WEIGHTS


def read(config: Config) -> DecoderSpec:
    """Read a config."""
    qkv_bias = config.flag("attention_bias", True)
    o_bias = config.flag("attention_out_bias")
    windows = read_full_attention(config)
    return read_dense(
        config,
        read_attention(config, qkv_bias=qkv_bias, o_bias=o_bias),
        windows=windows,
        mlps=[read_mlp(config, bias=config.flag("mlp_bias"))] * len(windows),
    )
