"""Mistral's dense models: a sliding window in all layers, or in those of ``layer_types``."""

from __future__ import annotations

from ..config import Config, read_window, read_windows
from ..spec import DecoderSpec
from .dense import DENSE_WEIGHTS, read_attention, read_dense

WEIGHTS = DENSE_WEIGHTS


def read(config: Config) -> DecoderSpec:
    """Read a config. ``sliding_window: null`` (Mistral 0.2 and later) means full attention."""
    layers = config.integer("num_hidden_layers")
    default = (read_window(config),) * layers
    windows = read_windows(config, layers, default)
    return read_dense(config, read_attention(config), windows=windows)
