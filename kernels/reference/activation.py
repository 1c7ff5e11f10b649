"""Activations in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..activations import CLAMPED_SWIGLU, Activation


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(x)``."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "relu":
            return F.relu(x)
        case "clamped_swiglu":
            raise ValueError("clamped_swiglu has a gate")


def act_and_mul(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up`` of [T, gate | up].

    clamped_swiglu limits the gate from above and up from both sides, and is
    ``gate * sigmoid(alpha * gate) * (up + 1)``.
    """
    gate, up = x.chunk(2, dim=-1)
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    limit, alpha = CLAMPED_SWIGLU["swiglu_limit"], CLAMPED_SWIGLU["swiglu_alpha"]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
