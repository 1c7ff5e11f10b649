"""Triton's interpreter, made to compute what GPUs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def interpret_as_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use float32, because Triton's interpreter multiplies the bits of bfloat16, and NaN of fp8,
    which it takes for 480."""
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

    monkeypatch.setattr(InterpreterBuilder, "create_dot", wide)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", with_nan)
