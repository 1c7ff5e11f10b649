"""SmolLM3: layers without rope between others."""

from __future__ import annotations

from ..config import Config, read_rope
from ..spec import DecoderSpec
from .dense import read_attention, read_dense, read_mlp
from .llama import WEIGHTS as WEIGHTS
from .qwen2 import qwen_windows


def read(config: Config) -> DecoderSpec:
    """Read a config. ``no_rope_layers`` has a one for each layer with rope, and a zero without."""
    config.one_of("use_sliding_window", (False,), False)
    windows, bias = qwen_windows(config), config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, o_bias=bias)
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.layers("no_rope_layers") or tuple(
        int((index + 1) % interval != 0) for index in range(len(windows))
    )
    if len(flags) != len(windows) or not set(flags) <= {0, 1}:
        raise config.refusal("no_rope_layers", flags, f"{len(windows)} zeros and ones")
    rope = read_rope(config, attention.head_dim, theta=2_000_000.0)
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    return read_dense(
        config,
        attention,
        windows=windows,
        ropes=[rope if flag else None for flag in flags],
        mlps=[mlp] * len(windows),
        tie_embeddings=True,
    )
