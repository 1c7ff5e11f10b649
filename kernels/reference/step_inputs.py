"""The inputs of a step on a device, in plain torch."""

from __future__ import annotations

import torch


def stage_inputs(
    inputs_4T: torch.Tensor,
    changes_E2: torch.Tensor,
    tables_NB: torch.Tensor,
    last_tokens_N: torch.Tensor,
    staged_3T: torch.Tensor,
) -> None:
    """See ``StageInputs``."""
    if len(changes_E2):
        tables_NB.view(-1)[changes_E2[:, 0].long()] = changes_E2[:, 1]
    tokens, positions, slots, owners = inputs_4T.long().unbind()
    staged_3T[0] = torch.where(tokens < 0, last_tokens_N[owners].long(), tokens)
    staged_3T[1], staged_3T[2] = positions, slots
