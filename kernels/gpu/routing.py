"""Triton choice of experts, in one launch.

    logits [T, E]   ->   weights [T, K] in fp32, indices [T, K] in int64

A program takes a row, as groups of experts in a matrix. It takes the best score K times, the first
of equal ones. A row whose logits are no numbers has weights that are none, and valid indices.

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


def choose_experts(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.routing.choose_experts``."""
    rows, experts = logits_TE.shape
    logits_TE = logits_TE.contiguous()
    assert logits_TE.dtype == torch.float32 and experts % routing.groups == 0
    for vector in (routing.correction, routing.expert_scale):
        assert vector is None or (vector.is_contiguous() and vector.shape == (experts,))
    weights_TK = logits_TE.new_empty(rows, routing.top_k)
    ids_TK = logits_TE.new_empty(rows, routing.top_k, dtype=torch.int64)
    if not rows:
        return weights_TK, ids_TK
    fixed = constants(routing, experts)
    _choose[(rows,)](
        logits_TE,
        logits_TE if routing.correction is None else routing.correction,
        logits_TE if routing.expert_scale is None else routing.expert_scale,
        weights_TK,
        ids_TK,
        routing.scale,
        **fixed,
        num_warps=1 if fixed["BLOCK_G"] * fixed["BLOCK_M"] <= _WARP else 4,
    )
    return weights_TK, ids_TK


@direct
@triton.jit(do_not_specialize_on_alignment=["correction_E", "expert_scale_E"])
def _choose(
    logits_TE: tl.tensor,
    correction_E: tl.tensor,
    expert_scale_E: tl.tensor,
    weights_TK: tl.tensor,
    ids_TK: tl.tensor,
    scale: tl.tensor,
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
    logits = tl.load(logits_TE + row * EXPERTS + expert, mask=there, other=float("-inf"))
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
    offs_k = tl.arange(0, BLOCK_K)
    ids, weights = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for number in tl.static_range(TOP_K):
        is_best = ranking == tl.max(ranking)
        chosen = tl.minimum(tl.min(tl.where(is_best, expert, EXPERTS)), EXPERTS - 1)
        is_chosen = expert == chosen
        weight = tl.sum(tl.where(is_chosen & there, scores, 0.0))
        ids = tl.where(offs_k == number, chosen, ids)
        weights = tl.where(offs_k == number, weight, weights)
        ranking = tl.where(is_chosen, float("-inf"), ranking)
    if NORMALISE:
        weights = weights / (tl.sum(weights) + _NO_SCORE)
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale_E + ids)
    at = row * TOP_K + offs_k
    tl.store(weights_TK + at, weights * scale, mask=offs_k < TOP_K)
    tl.store(ids_TK + at, ids.to(tl.int64), mask=offs_k < TOP_K)
