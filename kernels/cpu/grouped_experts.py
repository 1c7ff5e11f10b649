"""Experts of a mixture with weights in panels: one product for each half of all experts.

T rows, K experts of each, S = T K rows of all experts, in order of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numba import prange

from ..activations import Activation
from ..quantized import QuantizedWeight
from ..signatures import Weight
from .byte_products import FEW, GROUP_FIELDS, TILE_FIELDS, PanelWeights, RowPlan, filled_rows
from .byte_tile import TILES
from .jit import array, kernel
from .vector import narrow, widen

ActAndMul = Callable[[torch.Tensor, Activation], torch.Tensor]
_MAX_TILE = TILES[-1]


class GroupedWeights:
    """A weight of each expert, in the same runs of formats."""

    def __init__(
        self, weights: list[tuple[QuantizedWeight, ...]], biases: list[torch.Tensor] | None
    ) -> None:
        """Empties the list of weights."""
        self.count = len(weights)
        self.inputs = weights[0][0].inputs
        self.runs = [
            PanelWeights(run.format, self.count, run.outputs, run.inputs) for run in weights[0]
        ]
        heights = [run.outputs for run in self.runs]
        self._outputs = sum(heights)
        for index in reversed(range(self.count)):
            for run, weight in zip(self.runs, weights.pop(), strict=True):
                run.fill(index, weight)
        for index, bias in enumerate(biases or []):
            for run, part in zip(self.runs, bias.split(heights), strict=True):
                run.set_bias(index, part)

    def multiply(self, x: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """The products of fp32 rows, [S, outputs]."""
        out = torch.empty(len(plan.sources), self._outputs)
        column = 0
        for run in self.runs:
            run.multiply(array(x), plan, array(out), column)
            column += run.outputs
        return out


class GroupedExperts:
    """See ``signatures.Experts``. Each expert's weights are read once for all of its rows, and a
    row's results are added in the order of its experts."""

    waits = False  # a CPU is done when the call returns

    def __init__(
        self,
        gate_up: GroupedWeights,
        down: GroupedWeights,
        act_and_mul: ActAndMul,
        activation: Activation,
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self._act_and_mul = act_and_mul
        self.activation = activation

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the kernels for activations of this dtype."""
        x = torch.zeros(1, self.gate_up.inputs, dtype=dtype)
        self(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), None)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``signatures.Experts``."""
        sums = x.new_zeros(*x.shape) if out is None else out  # contiguous, even if x is not
        assert sums.is_contiguous()  # kernels write to its memory
        if len(x):
            plan, slots = assign(array(expert_ids), self.gate_up.count)
            hidden = self._act_and_mul(self.gate_up.multiply(x.float(), plan), self.activation)
            in_order = replace(plan, sources=np.arange(len(hidden)))
            results = self.down.multiply(hidden, in_order)
            add_weighted(array(results), array(weights), slots, array(sums))
        return sums


def quantised_alike(
    weights: Sequence[Weight], takes: Callable[[QuantizedWeight], bool]
) -> list[tuple[QuantizedWeight, ...]] | None:
    """The experts' weights, if all have the same runs of supported formats; else ``None``."""
    experts = []
    for weight in weights:
        runs = tuple(
            run
            for run in weight
            if isinstance(run, QuantizedWeight) and run.order is None and takes(run)
        )
        if len(runs) < len(weight):
            return None
        experts.append(runs)
    kinds = {tuple((run.format, run.blocks.shape) for run in runs) for runs in experts}
    return experts if len(kinds) == 1 else None


def assign(expert_ids: np.ndarray, experts: int) -> tuple[RowPlan, np.ndarray]:
    """The rows of each active expert, and the places [T, K] of each row's results."""
    sources, slots, tiles, groups = assign_rows(expert_ids, experts)
    return RowPlan(sources, tiles, groups), slots


@kernel()
def assign_rows(
    expert_ids: np.ndarray, experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The sources, slots, tiles and groups of ``assign``."""
    rows, width = expert_ids.shape
    active = min(expert_ids.size, experts)
    sources, slots = np.empty(expert_ids.size, np.int64), np.empty((rows, width), np.int64)
    tiles = np.empty((expert_ids.size // _MAX_TILE + active, TILE_FIELDS), np.int64)
    groups = np.empty((active, GROUP_FIELDS), np.int64)
    ends = np.zeros(experts, np.int64)
    for row in range(rows):
        for k in range(width):
            ends[expert_ids[row, k]] += 1
    tile_count, group_count, first, place = 0, 0, 0, 0
    for expert in range(experts):
        end = first + ends[expert]
        if end > first:
            groups[group_count, 0], groups[group_count, 1] = expert, tile_count
            for begin in range(first, end, _MAX_TILE):
                number = min(_MAX_TILE, end - begin)
                filled = filled_rows(number)
                tiles[tile_count, 0], tiles[tile_count, 1] = begin, number
                tiles[tile_count, 2], tiles[tile_count, 3] = filled, place
                place += filled
                tile_count += 1
            groups[group_count, 2] = tile_count
            group_count += 1
        ends[expert] = first
        first = end
    for row in range(rows):
        for k in range(width):
            slot = ends[expert_ids[row, k]]
            ends[expert_ids[row, k]] = slot + 1
            slots[row, k] = slot
            sources[slot] = row
    return sources, slots, tiles[:tile_count], groups[:group_count]


@kernel(parallel=True, exact=True)
def add_weighted(
    results: np.ndarray, weights: np.ndarray, slots: np.ndarray, out: np.ndarray
) -> None:
    if len(out) <= FEW:
        for t in range(len(out)):
            _add_row(results, weights[t], slots[t], out[t])
    else:
        for t in prange(len(out)):
            _add_row(results, weights[t], slots[t], out[t])


@kernel(exact=True)
def _add_row(results: np.ndarray, weights: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
    width = len(out)
    total = np.empty(width, np.float32)
    for c in range(width):
        total[c] = widen(out[c])
    for k in range(len(slots)):
        result, weight = results[slots[k]], widen(weights[k])
        for c in range(width):
            total[c] += weight * result[c]
    for c in range(width):
        out[c] = narrow(total[c], out[c])
