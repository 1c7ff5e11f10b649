"""Choice of experts in plain torch."""

from __future__ import annotations

import torch

from ..signatures import Routing

# Avoids division by zero: sigmoids of very negative logits are all zero in float32.
NO_SCORE = 1e-20


def choose_experts(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices of the experts of each row, both [T, K]."""
    scores = logits_TE.softmax(-1) if routing.scoring == "softmax" else logits_TE.sigmoid()
    ranking = scores if routing.correction is None else scores + routing.correction
    ranking = _mask_groups(ranking, routing)
    expert_ids = ranking.topk(routing.top_k, sorted=False).indices
    weights = scores.gather(1, expert_ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + NO_SCORE)
    if routing.expert_scale is not None:
        weights = weights * routing.expert_scale[expert_ids]
    return weights * routing.scale, expert_ids


def _mask_groups(ranking: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Mask the experts outside the best groups."""
    if routing.open_groups == routing.groups:
        return ranking
    by_group: torch.Tensor = ranking.unflatten(-1, (routing.groups, -1))
    quality = by_group.topk(routing.group_best).values.sum(-1)
    open_ids = quality.topk(routing.open_groups, sorted=False).indices
    is_closed = torch.ones_like(quality, dtype=torch.bool).scatter_(1, open_ids, False)
    return by_group.masked_fill(is_closed[..., None], -torch.inf).flatten(1)
