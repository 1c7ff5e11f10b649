"""Trial of the Triton product of a few rows with an unquantised weight, before it is used."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from ..signatures import Linear
from . import skinny_linear as kernels
from .trials import passes, relative_error, too_far

# Bytes of the largest weight. cuBLAS reads larger ones as fast as a copy does, and its second
# launch, which adds parts of sums, is little beside that.
LARGEST = 64 << 20
# Numbers that are read at a time.
_VECTOR = 8
# The allowed rounding errors, relative to a result's magnitude, or to one below it.
_LIMITS = {torch.float16: 0.004, torch.bfloat16: 0.03}
# Outputs of the trial's weight; not a multiple of what a program takes.
_OUTPUTS = 19


def skinny_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear | None:
    """The product with a small weight: of few rows by Triton, of more by torch. ``None`` for other
    weights, or if the kernels do not work."""
    outputs, inputs = weight_OI.shape
    if not _takes(weight_OI) or not works(outputs, inputs, weight_OI.dtype, weight_OI.device):
        return None
    warps = kernels.warps_of(outputs, inputs, weight_OI.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        if kernels.takes(x):
            return kernels.multiply(x, weight_OI, bias_O, warps)
        return F.linear(x, weight_OI, bias_O)

    return run


@cache
def works(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernels of all row counts for this shape compile and are correct on this device;
    logs the reason if not."""
    if device.type == "cpu":
        return False

    def trial() -> str:
        warps = kernels.warps_of(outputs, inputs, device)
        worst = max(largest_error(inputs, warps, rows, dtype, device) for rows in kernels.ROWS)
        return too_far(worst, _LIMITS[dtype])

    return passes(trial, "torch multiplies few rows, because of Triton")


def largest_error(
    inputs: int, warps: int, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest difference from torch's product in fp32."""
    generator = torch.Generator().manual_seed(0)
    bias, weight, x = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((_OUTPUTS,), (_OUTPUTS, inputs), (rows, inputs))
    )
    x /= inputs**0.5
    actual = kernels.multiply(x, weight, bias, warps)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    expected = F.linear(x.float(), weight.float(), bias.float())
    return relative_error(actual, expected)


def _takes(weight_OI: torch.Tensor) -> bool:
    """True if the kernel can read this weight, and it is small."""
    return (
        weight_OI.dtype in _LIMITS
        and 0 < weight_OI.nbytes <= LARGEST
        and weight_OI.shape[1] % _VECTOR == 0
        and weight_OI.is_contiguous()
        and weight_OI.data_ptr() % (_VECTOR * weight_OI.itemsize) == 0
    )
