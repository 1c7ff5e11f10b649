"""Triton choice of experts, in one launch.

    logits [T, E], or parts of their sums [S, T, E]   ->   weights [T, K] in fp32, indices [T, K] in
    int64

A program takes a row, as groups of experts in a matrix. It takes the best score K times, the first
of equal ones. A row whose logits are NaN has NaN weights and valid indices.

T rows, E experts, K chosen ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..reference.routing import NO_SCORE
from ..signatures import Routing
from .launch import direct, next_power_of_2

_NO_SCORE = tl.constexpr(NO_SCORE)
# Scores that one warp takes, which then need not wait for others.
_WARP = 256
_LOWEST = tl.constexpr(-(1 << 31))


def constants(routing: Routing, experts: int) -> dict[str, Any]:
    """Compile-time constants of ``_choose``."""
    is_grouped = routing.open_groups < routing.groups
    groups = routing.groups if is_grouped else 1
    return {
        "EXPERTS": experts,
        "TOP_K": routing.top_k,
        "GROUPS": groups,
        "OPEN_GROUPS": routing.open_groups if is_grouped else 1,
        "GROUP_BEST": routing.group_best,
        "IS_SOFTMAX": routing.scoring == "softmax",
        "HAS_CORRECTION": routing.correction is not None,
        "HAS_EXPERT_SCALE": routing.expert_scale is not None,
        "NORMALISE": routing.normalise,
        "BLOCK_G": next_power_of_2(groups),
        "BLOCK_M": next_power_of_2(experts // groups),
        "BLOCK_K": next_power_of_2(routing.top_k),
    }


def choose_experts(
    logits: torch.Tensor, routing: Routing, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.routing.choose_experts``; logits are first added to a bias."""
    rows, experts = logits.shape[-2:]
    logits_STE = logits.contiguous().view(-1, rows, experts) if rows else logits[None]
    assert logits.dtype == torch.float32 and experts % routing.groups == 0
    for vector in (routing.correction, routing.expert_scale, bias_E):
        assert vector is None or (vector.is_contiguous() and vector.shape == (experts,))
    weights_TK = logits.new_empty(rows, routing.top_k)
    ids_TK = logits.new_empty(rows, routing.top_k, dtype=torch.int64)
    if not rows:
        return weights_TK, ids_TK
    fixed = constants(routing, experts)
    _choose[(rows,)](
        logits_STE,
        logits_STE if bias_E is None else bias_E,
        logits_STE if routing.correction is None else routing.correction,
        logits_STE if routing.expert_scale is None else routing.expert_scale,
        weights_TK,
        ids_TK,
        rows,
        routing.scale,
        PARTS=len(logits_STE),
        HAS_BIAS=bias_E is not None,
        **fixed,
        num_warps=1 if fixed["BLOCK_G"] * fixed["BLOCK_M"] <= _WARP else 4,
    )
    return weights_TK, ids_TK


@direct
@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["bias_E", "correction_E", "expert_scale_E"],
)
def _choose(
    logits_STE: tl.tensor,
    bias_E: tl.tensor,
    correction_E: tl.tensor,
    expert_scale_E: tl.tensor,
    weights_TK: tl.tensor,
    ids_TK: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Choose the experts of a row."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    GROUP_SIZE: tl.constexpr = EXPERTS // GROUPS
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    there = (group < GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    logits = tl.load(logits_STE + row * EXPERTS + expert, mask=there, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        at = (part * rows.to(tl.int64) + row) * EXPERTS
        logits += tl.load(logits_STE + at + expert, mask=there, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias_E + expert, mask=there, other=0.0)
    if IS_SOFTMAX:
        scores = tl.exp(logits - tl.max(logits))
        scores = scores / tl.sum(scores)
    else:
        scores = tl.sigmoid(logits)
    ranking = scores
    if HAS_CORRECTION:
        ranking += tl.load(correction_E + expert, mask=there, other=0.0)
    ranking = tl.where(there, ranking, float("-inf"))
    if OPEN_GROUPS < GROUPS:
        quality = tl.zeros([BLOCK_G], tl.float32)
        rest = ranking
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(rest, axis=1)
            quality += best
            place = tl.min(tl.where(rest == best[:, None], member[None, :], BLOCK_M), axis=1)
            rest = tl.where(member[None, :] == place[:, None], float("-inf"), rest)
        is_open = group < 0
        for _ in tl.static_range(OPEN_GROUPS):
            quality_left = tl.where(is_open, float("-inf"), quality)
            place = tl.min(tl.where(quality_left == tl.max(quality_left), group, BLOCK_G))
            is_open = is_open | (group == place)
        ranking = tl.where(is_open[:, None], ranking, float("-inf"))
    # Integers in the order of scores, which an instruction reduces over a warp.
    bits = ranking.to(tl.int32, bitcast=True)
    ordered = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)
    offs_k = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for number in tl.static_range(TOP_K):
        is_best = ordered == tl.max(ordered)
        chosen = tl.min(tl.where(is_best, expert, EXPERTS - 1))
        ids = tl.where(offs_k == number, chosen, ids)
        ordered = tl.where(expert == chosen, _LOWEST, ordered)
    place = ids // GROUP_SIZE * BLOCK_M + ids % GROUP_SIZE
    weights = tl.gather(tl.reshape(scores, [BLOCK_G * BLOCK_M]), place, 0)
    weights = tl.where(offs_k < TOP_K, weights, 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights) + _NO_SCORE)
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale_E + ids)
    at = row * TOP_K + offs_k
    tl.store(weights_TK + at, weights * scale, mask=offs_k < TOP_K)
    tl.store(ids_TK + at, ids.to(tl.int64), mask=offs_k < TOP_K)
