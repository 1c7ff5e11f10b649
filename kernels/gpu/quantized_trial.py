"""Trial of the Triton product with quantised weights, before it is used."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from ..block_codes import read_rows
from ..block_formats import CODEBOOK_FORMATS, BlockFormat
from ..fp8 import FP8
from ..quantized import QuantizedWeight, grouped_codes
from .packed_codes import PackedCodes, pack_codes, takes
from .quantized_linear import ROWS, multiply
from .tiles import CHUNK
from .trials import passes, too_far

# Enough inputs for the kernels of all row counts to divide them between programs.
INPUTS = 32 * CHUNK


def has_kernel(kind: BlockFormat, dtype: torch.dtype) -> bool:
    """True if there is a kernel for activations of this dtype and weights of a format."""
    return takes(kind) and dtype in (torch.float16, torch.bfloat16)


@cache
def works(kind: BlockFormat, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the product compiles and is correct on this device; logs the reason if not.

    Tries the kernel of each row count and the one that decodes, so that no step compiles another.
    """
    if device.type == "cpu" or not has_kernel(kind, dtype):
        return False

    def trial() -> str:
        sizes = *ROWS, max(ROWS) + 1
        worst = max(largest_error(kind, dtype, device, rows) for rows in sizes)
        return too_far(worst, limit(dtype))

    return passes(trial, f"{kind.name} is decoded for each product, because of Triton")


def limit(dtype: torch.dtype) -> float:
    """The allowed rounding error of results of magnitude 1."""
    return 0.02 if dtype == torch.bfloat16 else 0.004


def largest_error(kind: BlockFormat, dtype: torch.dtype, device: torch.device, rows: int) -> float:
    """The largest difference from the reference, for results of magnitude 1."""
    generator = torch.Generator().manual_seed(0)
    packed, dense = random_codes(kind, device, generator)
    x = torch.randn(rows, packed.inputs, generator=generator).to(device, dtype)
    actual = multiply(x, packed)
    if device.type == "meta":  # nothing is computed there
        return 0.0
    size = dense.norm(dim=1).max()
    difference = actual.float() / size - F.linear(x.float(), dense) / size
    return float(difference.abs().nan_to_num(torch.inf).max())


def random_codes(
    kind: BlockFormat, device: torch.device, generator: torch.Generator
) -> tuple[PackedCodes, torch.Tensor]:
    """A random weight of a format, with scales up to one, and its values in fp32."""
    shape = (99, INPUTS // kind.values * kind.nbytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)

    def scales_like(scales: torch.Tensor) -> torch.Tensor:
        """Random bytes are scales of any size."""
        return torch.rand(scales.shape, generator=generator).to(scales)

    if kind in CODEBOOK_FORMATS:
        rows = read_rows(kind, blocks.unflatten(1, (-1, kind.nbytes)))
        rows = replace(rows, scale=scales_like(rows.scale))
        return pack_codes(kind, rows), rows.to_codes().values()
    weight = grouped_codes(QuantizedWeight(kind, blocks))
    scales = scales_like(weight.scales)
    minimums = None if weight.minimums is None else -scales.to(weight.minimums)
    codes = weight.codes
    if codes.dtype == FP8:  # some bytes are NaN
        codes = torch.randn(codes.shape, generator=generator).to(codes)
    weight = replace(weight, codes=codes, scales=scales, minimums=minimums)
    return pack_codes(kind, weight), weight.values()
