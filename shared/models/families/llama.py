"""Llama 2 and 3, and the many checkpoints that use their architecture."""

from __future__ import annotations

from ..config import Config, read_full_attention
from ..spec import DecoderSpec
from .dense import DENSE_WEIGHTS, MLP_BIAS, O_BIAS, QKV_BIAS, read_attention, read_dense, read_mlp

WEIGHTS = DENSE_WEIGHTS | QKV_BIAS | O_BIAS | MLP_BIAS


def read(config: Config) -> DecoderSpec:
    """Read a config: no window, and biases only if the config has them."""
    return _read(config, norm_eps=1e-6)


def read_iquestcoder(config: Config) -> DecoderSpec:
    """Read a config of IQuest-Coder, which has another default."""
    return _read(config, norm_eps=1e-5)


def _read(config: Config, norm_eps: float) -> DecoderSpec:
    bias = config.flag("attention_bias")
    windows = read_full_attention(config)
    return read_dense(
        config,
        read_attention(config, qkv_bias=bias, o_bias=bias),
        windows=windows,
        mlps=[read_mlp(config, bias=config.flag("mlp_bias"))] * len(windows),
        norm_eps=norm_eps,
    )
