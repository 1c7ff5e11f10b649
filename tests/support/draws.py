"""Draws of a sampler, as a runner gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.shared.engine.plan import PositionLogprobs
from tandem.shared.engine.rank.sampler import Sampler

if TYPE_CHECKING:
    from tandem.shared.engine.rank.gpu_sampler import GpuSampler


class Sampled(NamedTuple):
    """What was drawn for one sequence."""

    sequence_id: int
    tokens: list[int]
    logprobs: list[PositionLogprobs]


def last_tokens(slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The last tokens of slots in which nothing was drawn."""
    return torch.full((slots,), -7, dtype=torch.int32, device=device)


def draw(
    sampler: Sampler | GpuSampler,
    slots: Sequence[int],
    logits: torch.Tensor,
    masks: Mapping[int, bytes] = MappingProxyType({}),
) -> tuple[list[Sampled], dict[int, str]]:
    """What a sampler draws from a copy of these logits, and the sequences that failed."""
    slots_R = torch.tensor(slots, dtype=torch.int32, device=sampler.device)
    draws = sampler.draw(slots_R, slots, logits.clone().to(sampler.device), masks)
    if sampler.device.type == "cuda":
        torch.cuda.synchronize()
    drawn = draws.collect()
    assert drawn.sampled.keys() >= drawn.logprobs.keys()
    samples = [
        Sampled(key, tokens, drawn.logprobs.get(key, [])) for key, tokens in drawn.sampled.items()
    ]
    return samples, drawn.failed
