"""Activations of feed-forwards, by name. No torch."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu"]

# Constants of gpt-oss's activation, by their config names: the limit of both halves, and the slope
# of the sigmoid.
CLAMPED_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
