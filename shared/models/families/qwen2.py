"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config, read_window, read_windows
from ..spec import DecoderSpec
from .dense import DENSE_WEIGHTS, QKV_BIAS, read_attention, read_dense

WEIGHTS = DENSE_WEIGHTS | QKV_BIAS


def qwen_windows(config: Config) -> list[int | None]:
    """``sliding_window``, only with ``use_sliding_window``, and from ``max_window_layers`` on."""
    layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window"):
        config.get("sliding_window")
        config.get("layer_types")
        return [None] * layers
    window, first = read_window(config), config.count("max_window_layers", 28)
    default = tuple(window if index >= first else None for index in range(layers))
    return read_windows(config, layers, default)


def read(config: Config) -> DecoderSpec:
    """Read a config. The biases are part of the architecture, not of the config."""
    attention = read_attention(config, qkv_bias=True)
    # Embedding models may be trained to see later tokens.
    attention = replace(attention, causal=config.flag("is_causal", True))
    return read_dense(config, attention, windows=qwen_windows(config))
