"""Triton's interpreter, made to compute what GPUs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def interpret_as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use float32, because Triton's interpreter multiplies the bits of bfloat16; NaN of fp8, which
    it takes for 480; and any order of programs."""
    dot = InterpreterBuilder.create_dot

    def wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        narrow = tl.bfloat16
        a, b = (
            self.create_fp_ext(x, tl.float32) if x.dtype.scalar == narrow else x for x in (a, b)
        )
        return dot(self, a, b, *rest)

    cast = InterpreterBuilder.create_fp_to_fp

    def with_nan(self: Any, source: Any, *rest: Any) -> Any:
        result = cast(self, source, *rest)
        if source.dtype.scalar == tl.float8e4nv:
            result.data[(source.data & 0x7F) == 0x7F] = np.nan
        return result

    grid, program = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    order: list[int] = []

    def any_order(self: Any, programs: int, *rest: int) -> None:
        order[:] = torch.randperm(programs).tolist()
        grid(self, programs, *rest)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_dim", any_order)
    monkeypatch.setattr(
        InterpreterBuilder, "set_grid_idx", lambda self, x, *rest: program(self, order[x], *rest)
    )
    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", with_nan)
