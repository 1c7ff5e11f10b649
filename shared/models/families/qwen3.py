"""Qwen3's dense models: a norm over each head of q and k."""

from __future__ import annotations

from ..config import Config
from ..spec import AttentionSpec, DecoderSpec, QKNorm
from .dense import DENSE_WEIGHTS, O_BIAS, QK_NORM, QKV_BIAS, read_attention, read_dense
from .qwen2 import qwen_windows

WEIGHTS = DENSE_WEIGHTS | QK_NORM | QKV_BIAS | O_BIAS


def read(config: Config) -> DecoderSpec:
    """Read a config. ``attention_bias`` is for q, k, v and the output."""
    return read_dense(config, read_normed_attention(config), windows=qwen_windows(config))


def read_normed_attention(config: Config) -> AttentionSpec:
    """Attention with a norm over each head of q and k."""
    bias = config.flag("attention_bias")
    return read_attention(config, qk_norm=QKNorm.HEAD, qkv_bias=bias, o_bias=bias)
