"""Trials of the Triton choice of experts and router, before they are used."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ..reference import routing as reference
from ..signatures import Routing
from . import router
from .routing import choose_experts
from .trials import passes, too_far

_ROWS = 33
_LIMIT = 1e-4
_ALIGNED = 16


def narrowed(weight_EC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight in a dtype that the router multiplies and that represents all of it, if any."""
    if dtype not in (torch.float16, torch.bfloat16) or weight_EC.shape[1] % _ALIGNED:
        return None
    narrow = weight_EC.to(dtype)
    is_same = narrow.device.type == "meta" or narrow.float().equal(weight_EC)
    return narrow if is_same else None


def works(routing: Routing, experts: int, device: torch.device) -> bool:
    """True if the kernel compiles and is correct on this device; logs the reason if not."""
    if device.type == "cpu":
        return False
    has = routing.correction is not None, routing.expert_scale is not None
    return _works(replace(routing, correction=None, expert_scale=None), has, experts, device)


def router_works(weight_EC: torch.Tensor, bias_E: torch.Tensor | None, routing: Routing) -> bool:
    """True if the router kernel works."""
    if weight_EC.device.type == "cpu":
        return False
    vectors = routing.correction, routing.expert_scale, bias_E
    bare = replace(routing, correction=None, expert_scale=None)
    return _router_works(
        bare,
        tuple(each is not None for each in vectors),
        tuple(weight_EC.shape),
        weight_EC.dtype,
        weight_EC.device,
    )


@cache
def _router_works(
    routing: Routing,
    has: tuple[bool, bool, bool],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    return passes(
        lambda: too_far(router_error(routing, has, shape, dtype, device), _LIMIT),
        "torch multiplies for the choice of experts, because of Triton",
    )


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
    routing = _with_vectors(routing, has, experts, random, device)
    logits = torch.randn(_ROWS, experts, generator=random).to(device)
    return _difference(choose_experts(logits, routing), logits, routing)


def router_error(
    routing: Routing,
    has: tuple[bool, bool, bool],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The router's largest difference, for few rows and many; with a bias if the last of ``has`` is
    true."""
    (experts, inputs), random = shape, torch.Generator().manual_seed(0)
    routing = _with_vectors(routing, has[:2], experts, random, device)
    bias = torch.rand(experts, generator=random).to(device) if has[2] else None
    weight = (torch.randn(shape, generator=random) * inputs**-0.5).to(device, dtype)
    # The same rows again and again, since few chances of a tie are better than many.
    x = torch.randn(_ROWS, inputs, generator=random).to(device, dtype)
    x = x.repeat(router.FEW // _ROWS + 1, 1)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias)
    return max(
        _difference(router.route(x[:rows], weight, bias, routing), logits[:rows], routing)
        for rows in (_ROWS, len(x))
    )


def _with_vectors(
    routing: Routing,
    has: tuple[bool, bool],
    experts: int,
    random: torch.Generator,
    device: torch.device,
) -> Routing:
    correction, scales = (
        torch.rand(experts, generator=random).to(device) if each else None for each in has
    )
    return replace(routing, correction=correction, expert_scale=scales)


def _difference(
    choice: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, routing: Routing
) -> float:
    """The largest difference from the reference's weights of all experts."""
    if logits.device.type == "meta":  # nothing is computed there
        return 0.0
    sides = choice, reference.choose_experts(logits, routing)
    result, expected = (torch.zeros_like(logits).scatter_(1, ids, w) for w, ids in sides)
    return float((result - expected).abs().nan_to_num(torch.inf).max()) / routing.scale
