"""A layer's products and the operators between them, in one call.

With few rows, a call and the conversion of its arguments take as long as a small operator's work.
Each part calls the kernels of its operators, so results are bit-identical.

Shapes as in ``operators.py``; activations are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange

from ..signatures import CosSin, LayerKV
from .byte_products import FEW, PanelLinear, PanelWeights, group_products, plan_of_all
from .cached_kv import CachedArrays, cached_arrays
from .callees import Callee, call_callee
from .jit import Same, array, kernel
from .pointwise import add_rms_norm, rms_norm, rope_and_cache_kv, row_rope, silu_and_mul


class CompiledQueries:
    """See ``Operators.prepare_queries``."""

    def __init__(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        qkv: Sequence[PanelLinear],
        head_weight_RD: torch.Tensor | None,
        head_eps: float,
        of_step: Same[torch.Tensor, np.ndarray],
    ) -> None:
        """``of_step`` is shared by all layers of a model."""
        self._products = qkv  # keeps the memory alive to which the runs point
        runs, self.width = runs_of(qkv)
        none = norm_weight.new_empty(0, 0)
        head_weight = array(none if head_weight_RD is None else head_weight_RD)
        self.before = array(norm_weight), eps, runs, self.width
        self.after = head_weight, head_eps
        self._of_step, self._of_cache = of_step, Same(cached_arrays)

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin,
        cache: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """The rows' queries [T, H, D]."""
        cos, sin, slots = self._of_step(*cos_sin, slots_T)
        keys, values = self._of_cache(*cache)
        kv_heads, _, dim = keys[0].shape
        plan = plan_of_all(len(x))
        out = torch.empty(len(x), self.width // dim - 2 * kv_heads, dim)
        q = array(out)
        project(
            array(x),
            *self.before,
            plan.sources,
            plan.tiles,
            plan.groups,
            *self.after,
            row_rope(q.dtype, cos.dtype, keys[0].dtype),
            cos,
            sin,
            keys,
            values,
            slots,
            q,
        )
        return out


class CompiledFeedForward:
    """See ``Operators.prepare_feed_forward``."""

    def __init__(
        self,
        o: Sequence[PanelLinear],
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: Sequence[PanelLinear],
        down: Sequence[PanelLinear],
    ) -> None:
        self._products = o, gate_up, down  # keeps the memory alive to which the runs point
        gate_up_runs, width = runs_of(gate_up)
        norm = array(norm_weight)
        self.constants = runs_of(o)[0], norm, eps, gate_up_runs, width, runs_of(down)[0]

    def __call__(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [T, C]."""
        plan, out = plan_of_all(len(x)), torch.empty(x.shape)
        feed_forward(
            array(attended),
            array(x),
            *self.constants,
            plan.sources,
            plan.tiles,
            plan.groups,
            array(out),
        )
        return out


def runs_of(products: Sequence[PanelLinear | PanelWeights]) -> tuple[np.ndarray, int]:
    """The arguments of a product in runs, a row for each run, and its number of outputs."""
    rows, column = [], 0
    for each in products:
        rows.append((*each.constants, column, *group_products()))
        column += each.outputs
    return np.array(rows, np.int64), column


@kernel()
def multiply_runs(
    runs: np.ndarray,
    x: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
) -> None:
    for run in runs:
        constants = (
            *(run[0], run[1], run[2], run[3], run[4]),
            *(run[5], run[6], run[7], run[8], run[9]),
        )
        call_callee((run[11], run[12]), (*constants, x, sources, tiles, groups, out, run[10]))


@kernel()
def project(
    x: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    qkv_runs: np.ndarray,
    width: int,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    head_weight_RD: np.ndarray,
    head_eps: float,
    rope_row: Callee,
    cos: np.ndarray,
    sin: np.ndarray,
    keys: CachedArrays,
    values: CachedArrays,
    slots_T: np.ndarray,
    q_THD: np.ndarray,
) -> None:
    rows, dim = len(x), q_THD.shape[2]
    normed, qkv = np.empty_like(x), np.empty((rows, width), np.float32)
    rms_norm(x, norm_weight, eps, normed)
    multiply_runs(qkv_runs, normed, sources, tiles, groups, qkv)
    rope_and_cache_kv(
        rope_row,
        qkv.reshape(rows, width // dim, dim),
        head_weight_RD,
        head_eps,
        cos,
        sin,
        keys,
        values,
        slots_T,
        q_THD,
    )


@kernel(parallel=True)
def feed_forward(
    attended: np.ndarray,
    x: np.ndarray,
    o_runs: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    gate_up_runs: np.ndarray,
    width: int,
    down_runs: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
) -> None:
    rows = len(x)
    projected, normed, total = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    multiply_runs(o_runs, attended, sources, tiles, groups, projected)
    add_rms_norm(projected, x, norm_weight, eps, normed, total)
    hidden, activated = (
        np.empty((rows, width), np.float32),
        np.empty((rows, width // 2), np.float32),
    )
    multiply_runs(gate_up_runs, normed, sources, tiles, groups, hidden)
    silu_and_mul(hidden, activated)
    multiply_runs(down_runs, activated, sources, tiles, groups, out)
    if rows <= FEW:
        for t in range(rows):
            _add_row(out[t], total[t])
    else:
        for t in prange(rows):
            _add_row(out[t], total[t])


@kernel()
def _add_row(out: np.ndarray, more: np.ndarray) -> None:
    for c in range(len(out)):
        out[c] += more[c]
