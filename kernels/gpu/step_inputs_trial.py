"""Trial of the Triton kernel for a step's inputs, before it is used."""

from __future__ import annotations

from functools import cache

import torch

from ..reference.step_inputs import stage_inputs as reference
from .step_inputs import stage_inputs
from .trials import passes


@cache
def works(device: torch.device) -> bool:
    """True if the kernel compiles and is correct on this device; logs the reason if not."""
    if device.type == "cpu":
        return False
    return passes(lambda: difference(device), "torch stages the inputs of steps, because of Triton")


def difference(device: torch.device) -> str:
    """The difference from torch's results; empty if there is none."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 9, (4, 300), generator=random, dtype=torch.int32)
    inputs[0, ::3] = -1
    changes = torch.stack([torch.randperm(70, generator=random)[:31], torch.arange(31)], 1)
    arguments = inputs.to(device), changes.to(device, torch.int32)
    last_tokens = torch.arange(9, dtype=torch.int32, device=device)
    results = []
    for stage in (stage_inputs, reference):
        tables = torch.zeros(10, 7, dtype=torch.int32, device=device)
        staged = torch.zeros(3, 300, dtype=torch.int64, device=device)
        stage(*arguments, tables, last_tokens, staged)
        results.append((tables, staged))
    if device.type == "meta":  # nothing is computed there
        return ""
    same = all(map(torch.equal, *results))
    return "" if same else "its inputs differ"
