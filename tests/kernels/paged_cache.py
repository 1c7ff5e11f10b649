"""Paged caches for tests of Triton's attention: on a GPU if there is one, else as Triton interprets
kernels."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.scaled import INT8, CachedKV, ScaledKV, TensorScaledKV

# Otherwise tests/conftest.py makes Triton interpret kernels.
INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP8 = torch.float8_e4m3fn
# Of the result, by the type in which products are taken.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# numpy's warnings, which interprets the kernels.
NOT_NUMBERS = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


def poisoned_cache(
    shape: tuple[int, ...], dtype: torch.dtype, whole_scale: float | None = None
) -> CachedKV:
    """A cache that nothing was written to."""
    if whole_scale is not None:
        return TensorScaledKV(torch.full(shape, torch.nan, device=DEVICE).to(dtype), whole_scale)
    if dtype != INT8:
        return torch.full(shape, torch.nan, device=DEVICE).to(dtype)
    scales = torch.full((*shape[:-1], 1), torch.nan, device=DEVICE)
    return ScaledKV(torch.full(shape, 77, dtype=INT8, device=DEVICE), scales)
