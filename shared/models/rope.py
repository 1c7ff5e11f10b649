"""Rotary position embedding: the frequencies of a spec, and the angles of a step."""

from __future__ import annotations

import math

import torch

from .spec import LinearScaling, Llama3Scaling, RopeSpec


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[head_dim / 2] in fp32, scaled as the spec says."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Wavelengths longer than the ramp are stretched, shorter ones kept."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class Rope:
    """Angles are computed once a step and serve all layers: no table as long as the context."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(spec).to(device)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [T, 1, head_dim] in fp32, as ``rotary`` takes them."""
        angles = (positions_T.float()[:, None] * self.frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
