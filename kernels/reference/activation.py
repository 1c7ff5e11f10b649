"""Gated activations in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..signatures import Activation


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up`` of [T, gate | up]."""
    gate, up = x.chunk(2, dim=-1)
    match activation:
        case "silu":
            return F.silu(gate) * up
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
