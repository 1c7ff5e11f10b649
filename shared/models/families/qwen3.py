"""Qwen3's dense models: a norm over each head of q and k."""

from __future__ import annotations

from ..config import Config
from ..spec import DecoderSpec
from .dense import DENSE_WEIGHTS, O_BIAS, QK_NORM, QKV_BIAS, read_dense
from .qwen2 import qwen_windows

WEIGHTS = DENSE_WEIGHTS | QK_NORM | QKV_BIAS | O_BIAS


def read(config: Config) -> DecoderSpec:
    """Read a config. ``attention_bias`` is for q, k, v and the output."""
    bias = config.flag("attention_bias")
    windows = qwen_windows(config)
    return read_dense(config, windows=windows, qk_norm=True, qkv_bias=bias, o_bias=bias)
