"""Memory that kernels' wrappers allocate, and have to write before they read it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_MODULES = "tandem.kernels."
# Bytes that make NaN of any dtype, and of integers large ones, which are no index of anything.
_NAN, _LARGE = 0xFF, 0x7E


def poison_allocations() -> None:
    """Fill what modules of kernels allocate with numbers that no test may find in a result. For the
    rest of the process."""
    torch.empty = _poisoned(torch.empty)
    torch.empty_like = _poisoned(torch.empty_like)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(allocate)
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals["__name__"].startswith(_MODULES) and x.is_cpu:
            memory: Any = x.untyped_storage()
            memory.fill_(_NAN if x.is_floating_point() else _LARGE)
        return x

    return poisoned
