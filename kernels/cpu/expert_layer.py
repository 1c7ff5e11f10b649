"""The part of a layer after attention, with experts, in one call: the output projection, the norm,
the router, the selected experts, and the sum with the layer's input.

With few rows, calling operators between the products takes as long as the products, and the other
threads fall asleep. Each part calls the kernels of its operators.

T rows, E experts, K of them for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numba import prange

from ..operators import joined
from ..signatures import Routing
from .byte_products import FEW, PanelLinear, plan_of_all
from .exponential import exp
from .grouped_experts import GroupedExperts, add_weighted, assign_rows
from .jit import array, kernel
from .layer_parts import multiply_runs, runs_of
from .linear import PACKED, PackedWeight, multiply_panels
from .pointwise import add_rms_norm, silu_and_mul
from .vector import LANES

# The reference adds it to the sum of scores, which may be zero.
_NO_SCORE = np.float32(1e-20)


class CompiledExpertLayer:
    """See ``Operators.prepare_expert_feed_forward``."""

    def __init__(
        self,
        o: Sequence[PanelLinear],
        norm_weight: torch.Tensor,
        eps: float,
        router: PackedWeight,
        routing: Routing,
        experts: GroupedExperts,
    ) -> None:
        self._o, self._router, self._experts = o, router, experts
        self._top_k = routing.top_k
        none = norm_weight.new_empty(0)
        correction = array(none if routing.correction is None else routing.correction)
        softmax = routing.scoring == "softmax"
        self._choice = softmax, routing.normalise, routing.scale, correction
        gate_up, width = runs_of(experts.gate_up.runs)
        down, _ = runs_of(experts.down.runs)
        self.constants = runs_of(o)[0], array(norm_weight), eps, gate_up, width, down
        count = experts.gate_up.count
        self.routing = router.panels, count, routing.top_k, *self._choice
        # Layers of the same kind are computed in one call.
        self.kind = router.panels.shape, count, replace(routing, correction=None), len(correction)

    def __call__(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [T, C]."""
        if len(x) >= PACKED:
            return self._composed(attended, x)
        plan, out = plan_of_all(len(x)), torch.empty(x.shape)
        expert_layer(
            array(attended),
            array(x),
            *self.constants,
            plan.sources,
            plan.tiles,
            plan.groups,
            *self.routing,
            array(out),
        )
        return out

    def _composed(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The same for many rows, which the router packs."""
        normed, out = torch.empty(x.shape), torch.empty(x.shape)
        add_rms_norm(
            array(joined(self._o)(attended)),
            array(x),
            *self.constants[1:3],
            array(normed),
            array(out),
        )
        weights = torch.empty(len(x), self._top_k)
        expert_ids = torch.empty(len(x), self._top_k, dtype=torch.int64)
        choose(array(self._router(normed)), *self._choice, array(weights), array(expert_ids))
        self._experts(normed, weights, expert_ids, out)
        return out


@kernel(parallel=True)
def choose(
    logits_TE: np.ndarray,
    softmax: bool,
    normalise: bool,
    scale: float,
    correction: np.ndarray,
    weights_TK: np.ndarray,
    expert_ids_TK: np.ndarray,
) -> None:
    """Write the experts with the best scores of each row, and their weights. Overwrites the
    logits."""
    if len(logits_TE) <= FEW:
        for t in range(len(logits_TE)):
            _choose_row(
                logits_TE[t], softmax, normalise, scale, correction, weights_TK[t], expert_ids_TK[t]
            )
    else:
        for t in prange(len(logits_TE)):
            _choose_row(
                logits_TE[t], softmax, normalise, scale, correction, weights_TK[t], expert_ids_TK[t]
            )


@kernel()
def _choose_row(
    scores: np.ndarray,
    softmax: bool,
    normalise: bool,
    scale: float,
    correction: np.ndarray,
    weights: np.ndarray,
    expert_ids: np.ndarray,
) -> None:
    if softmax:
        highest = scores.max()
        for e in range(len(scores)):
            scores[e] = exp(scores[e] - highest)
        total = scores.sum()
        for e in range(len(scores)):
            scores[e] /= total
    else:
        for e in range(len(scores)):
            scores[e] = np.float32(1) / (np.float32(1) + exp(-scores[e]))
    ranked = scores + correction if len(correction) else scores.copy()
    total = np.float32(0)
    for k in range(len(expert_ids)):
        best = ranked.argmax()
        ranked[best] = -np.inf
        expert_ids[k], weights[k] = best, scores[best]
        total += scores[best]
    factor = np.float32(scale)
    if normalise:
        factor /= total + _NO_SCORE
    for k in range(len(expert_ids)):
        weights[k] *= factor


@kernel()
def expert_layer(
    attended: np.ndarray,
    x: np.ndarray,
    o_runs: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    gate_up_runs: np.ndarray,
    mlp_width: int,
    down_runs: np.ndarray,
    sources: np.ndarray,
    tiles: np.ndarray,
    groups: np.ndarray,
    router_panels: np.ndarray,
    experts: int,
    width: int,
    softmax: bool,
    normalise: bool,
    scale: float,
    correction: np.ndarray,
    out: np.ndarray,
) -> None:
    """``width``: the number of experts of a row."""
    rows = len(x)
    projected, normed = np.empty_like(x), np.empty_like(x)
    multiply_runs(o_runs, attended, sources, tiles, groups, projected)
    add_rms_norm(projected, x, norm_weight, eps, normed, out)
    padded = np.empty((rows, len(router_panels) * LANES), np.float32)
    multiply_panels(router_panels, normed, padded)
    logits = padded[:, :experts].copy()
    weights, expert_ids = np.empty((rows, width), np.float32), np.empty((rows, width), np.int64)
    choose(logits, softmax, normalise, scale, correction, weights, expert_ids)
    count = rows * width
    of_row, slots, expert_tiles, expert_groups = assign_rows(expert_ids, experts)
    hidden = np.empty((count, mlp_width), np.float32)
    multiply_runs(gate_up_runs, normed, of_row, expert_tiles, expert_groups, hidden)
    activated = np.empty((count, mlp_width // 2), np.float32)
    silu_and_mul(hidden, activated)
    results = np.empty((count, out.shape[1]), np.float32)
    in_order = np.arange(count)
    multiply_runs(down_runs, activated, in_order, expert_tiles, expert_groups, results)
    add_weighted(results, weights, slots, out)
