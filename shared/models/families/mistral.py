"""Mistral's dense models: a sliding window in all layers, or in those of ``layer_types``."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config, read_rope, read_window, read_windows
from ..spec import DecoderSpec, QueryScale
from .dense import DENSE_WEIGHTS, read_attention, read_dense

WEIGHTS = DENSE_WEIGHTS


def read(config: Config) -> DecoderSpec:
    """Read a config. ``sliding_window: null`` (Mistral 0.2 and later) means full attention."""
    layers = config.integer("num_hidden_layers")
    default = (read_window(config, 4096),) * layers
    windows = read_windows(config, layers, default)
    return read_dense(config, read_attention(config), windows=windows)


def read_ministral3(config: Config) -> DecoderSpec:
    """Read a config of Ministral 3: YaRN, and queries that grow with their position."""
    layers = config.integer("num_hidden_layers")
    windows = [read_window(config)] * layers
    attention, table = read_attention(config), config.get("rope_parameters")
    if table is None:
        raise config.refusal("rope_parameters", None, "a table of YaRN")
    rope = read_rope(config, attention.head_dim, theta=1_000_000.0)
    # Devstral 2 has zero, which means none.
    if isinstance(table, dict) and table.get("llama_4_scaling_beta"):
        scale = config.table("rope_parameters", table)
        attention = replace(
            attention,
            query_scale=QueryScale(
                beta=scale.number("llama_4_scaling_beta"),
                original_max_position=scale.integer("original_max_position_embeddings"),
            ),
        )
    return read_dense(config, attention, windows=windows, ropes=[rope] * layers, norm_eps=1e-5)
