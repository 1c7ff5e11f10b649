"""Trial of the Triton choice of experts, before it is used."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ..reference import routing as reference
from ..signatures import Routing
from .trials import passes, too_far

_ROWS = 33
_LIMIT = 1e-4


def choose_experts(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.routing.choose_experts``, importing Triton on demand."""
    from .routing import choose_experts

    return choose_experts(logits_TE, routing)


def works(routing: Routing, experts: int, device: torch.device) -> bool:
    """True if the kernel compiles and is correct on this device; logs the reason if not."""
    if device.type == "cpu":
        return False
    has = routing.correction is not None, routing.expert_scale is not None
    return _works(replace(routing, correction=None, expert_scale=None), has, experts, device)


@cache
def _works(routing: Routing, has: tuple[bool, bool], experts: int, device: torch.device) -> bool:
    return passes(
        lambda: too_far(largest_error(routing, has, experts, device), _LIMIT),
        "torch chooses experts, because of Triton",
    )


def largest_error(
    routing: Routing, has: tuple[bool, bool], experts: int, device: torch.device
) -> float:
    """The largest difference from the reference in the weights of all experts, with a correction
    and scales if the routing ``has`` them."""
    random = torch.Generator().manual_seed(0)
    correction, scales = (
        torch.rand(experts, generator=random).to(device) if each else None for each in has
    )
    routing = replace(routing, correction=correction, expert_scale=scales)
    logits = torch.randn(_ROWS, experts, generator=random).to(device)
    weights, expert_ids = choose_experts(logits, routing)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = torch.zeros_like(logits).scatter_(
        1, *reversed(reference.choose_experts(logits, routing))
    )
    result = torch.zeros_like(logits).scatter_(1, expert_ids, weights)
    return float((result - expected).abs().nan_to_num(torch.inf).max()) / routing.scale
