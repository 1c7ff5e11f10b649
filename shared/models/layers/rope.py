"""Rotary position embedding: the frequencies of a spec, and cos and sin of a step."""

from __future__ import annotations

import math

import torch

from ....kernels.signatures import CosSin
from ..spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)

# The initial size of a table that grows.
_TABLE_ROWS = 1024
# The most memory of a table of all positions: of 262,144 where 128 dimensions are rotated.
_TABLE_BYTES = 256 << 20


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] in fp32, scaled according to the spec."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    frequencies = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return frequencies
        case DynamicScaling():
            return frequencies
        case ProportionalScaling(rotated=rotated, factor=factor):
            return torch.cat([frequencies[:rotated] / factor, frequencies[rotated:] * 0])
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(frequencies, spec, scaling)
        case LongRopeScaling(factors=factors):
            return frequencies / torch.tensor(factors)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Stretch wavelengths longer than the ramp, keep shorter ones."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def _yarn(frequencies: torch.Tensor, spec: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    """Ramp over the indices of frequencies, which determine the number of turns."""
    low = _index_that_turns(scaling.beta_fast, spec, scaling)
    high = _index_that_turns(scaling.beta_slow, spec, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    numbers = torch.arange(len(frequencies), dtype=torch.float32)
    ramp = ((numbers - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return (1 - ramp) * frequencies + ramp * frequencies / scaling.factor


def _index_that_turns(times: float, spec: RopeSpec, scaling: YarnScaling) -> float:
    """The index of the frequency that turns ``times`` times in the original context."""
    longest = scaling.original_max_position / (2 * math.pi * times)
    return spec.dim * math.log(longest) / (2 * math.log(spec.theta))


class Rope:
    """cos and sin of a step's rows; empty without a spec, so that nothing is rotated."""

    def __init__(self, spec: RopeSpec | None, device: torch.device, positions: int = 0) -> None:
        """Steps look up all positions below ``positions``, which are computed here, if they do not
        take too much memory; no step has others then."""
        frequencies = torch.empty(0) if spec is None else inverse_frequencies(spec)
        self.frequencies = frequencies.to(device)
        # On the meta device `cat` would import torch's compiler, which takes a second.
        self._angles = self.frequencies.repeat(2)
        self._signs = torch.cat([-torch.ones(len(frequencies)), torch.ones(len(frequencies))])
        self._signs = self._signs.to(device)
        scaling = None if spec is None else spec.scaling
        self.attention_factor: float = getattr(scaling, "attention_factor", 1.0)
        dim = len(self._angles)
        # cos and sin of the first positions, [2, positions, 1, dim].
        self._table = self._angles.new_empty(2, 0, 1, dim)
        # cos and sin of all positions, [2, positions, dim].
        self._whole: torch.Tensor | None = None
        if 0 < 2 * positions * dim * 4 <= _TABLE_BYTES:
            self._whole = torch.stack(self.cos_sin(torch.arange(positions, device=device)))[:, :, 0]

    def cos_sin(self, positions_T: torch.Tensor) -> CosSin:
        """cos and sin for the operators, [T, 1, dim] in fp32."""
        if not len(self._angles):
            none = self._angles.new_empty(len(positions_T), 1, 0)
            return none, none
        if self._whole is not None:
            cos, sin = self._whole.index_select(1, positions_T).unsqueeze(2).unbind()
            return cos, sin
        angles = positions_T.view(-1, 1, 1) * self._angles
        cos, sin = angles.cos(), angles.sin().mul_(self._signs)
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin

    def cos_sin_below(self, positions_T: torch.Tensor, end: int) -> CosSin:
        """The same for positions below ``end``, from a table that grows with ``end``: for a few
        rows on a CPU, computing ``cos_sin`` is mostly overhead."""
        size = self._table.shape[1]
        if size < end:
            rows = max(end, 2 * size, _TABLE_ROWS)
            self._table = torch.stack(self.cos_sin(torch.arange(rows, device=positions_T.device)))
        cos, sin = self._table.index_select(1, positions_T).unbind()
        return cos, sin
