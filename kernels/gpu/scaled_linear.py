"""Products with e4m3 weights by torch's scaled product: tensor cores multiply the codes directly.

Activations are rounded to e4m3 too, as the checkpoints' quantisers expect: with a scale for each
row beside weights that have one for each output, or for each 128 inputs of a row beside weights
that have one for each 128 x 128 block. NVIDIA's GPUs multiply e4m3 since sm_89, and blocks on sm_90
alone. The results are bfloat16, in which sums are taken apart from the tensor cores' own.

M rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

from ..block_formats import GroupFormat
from ..fp8 import FP8
from ..grouped_codes import GroupedCodes
from ..quantized import QuantizedWeight, grouped_codes
from .capability import capability_of
from .trials import passes, too_far

# What shares a scale: the inputs of an output, or a block.
Scaling = Literal["rows", "blocks"]
_BLOCK = 128
_LARGEST = torch.finfo(FP8).max
_SMALLEST = torch.finfo(torch.float32).tiny
# Inputs and outputs are multiples of this: 16 bytes.
_ALIGNED = 16
# The scales of a row of blocks begin at multiples of _PADDED, and rows are padded to one.
_PADDED = 4
_OLDEST: dict[Scaling, tuple[int, int]] = {"rows": (8, 9), "blocks": (9, 0)}


class ScaledLinear:
    """The scaled product for any number of rows."""

    def __init__(self, codes: GroupedCodes, scaling: Scaling, bias: torch.Tensor | None) -> None:
        self._weight = codes
        self._columns = codes.codes.t()
        self._scales = weight_scales(codes, scaling)
        self._scaling = scaling
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):  # not supported by the libraries
            return x.new_empty(0, self._weight.outputs)
        # Scales of blocks are read 16 bytes at a time.
        missing = -len(x) % _PADDED if self._scaling == "blocks" else 0
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x
        rounded, scales = rounded_rows(padded, self._scaling)
        out = torch._scaled_mm(
            rounded, self._columns, scales, self._scales, out_dtype=torch.bfloat16
        )[: len(x)]
        return out if self._bias is None else out + self._bias.to(out.dtype)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """See ``QuantizedLinear``."""
        return self._weight.part(outputs).values()


def scaled_linear(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> ScaledLinear | None:
    """The scaled product with a weight, if its format rounds activations and this GPU multiplies
    the codes."""
    device, format = weight.blocks.device, weight.format
    if not isinstance(format, GroupFormat) or not format.rounds_inputs or dtype != torch.bfloat16:
        return None
    codes = grouped_codes(weight)
    scaling = scaling_of(codes)
    if scaling is None or not multiplies(scaling, capability_of(device)):
        return None
    even = codes.inputs // _BLOCK % _PADDED == 0
    return ScaledLinear(codes, scaling, bias) if works(scaling, device, even) else None


def scaling_of(codes: GroupedCodes) -> Scaling | None:
    """What shares a scale; ``None`` if there is no scaled product for the codes."""
    outputs, inputs = codes.outputs, codes.inputs
    if codes.codes.dtype != FP8 or outputs % _ALIGNED or inputs % _ALIGNED:
        return None
    scales = codes.scales.float()
    if bool((scales == scales[:, :1]).all()):
        return "rows"
    if codes.group != _BLOCK:
        return None
    firsts = scales[::_BLOCK].repeat_interleave(_BLOCK, dim=0)[:outputs]
    return "blocks" if torch.equal(scales, firsts) else None


def multiplies(scaling: Scaling, capability: tuple[int, int]) -> bool:
    """True if torch has a scaled product for a generation."""
    oldest = _OLDEST[scaling]
    return capability == oldest if scaling == "blocks" else capability >= oldest


def weight_scales(codes: GroupedCodes, scaling: Scaling) -> torch.Tensor:
    """The scales in the product's layout: [1, O], or [I / 128, O / 128] with columns aligned to 16
    bytes."""
    scales = codes.scales.float()
    if scaling == "rows":
        return scales[:, 0].contiguous()[None]
    blocks = scales[::_BLOCK]
    columns = blocks.shape[1]
    padded = blocks.new_zeros(len(blocks), -(-columns // _PADDED) * _PADDED)
    padded[:, :columns] = blocks
    return padded[:, :columns].t()


def rounded_rows(x: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, I] in e4m3, and their scales: [M, 1], or [M, I / 128] column-major."""
    inputs = x.shape[1]
    groups = x.unflatten(1, (-1, inputs if scaling == "rows" else _BLOCK))
    largest = torch.linalg.vector_norm(groups, torch.inf, dim=-1, keepdim=True).float()
    scales = (largest / _LARGEST).clamp_(min=_SMALLEST)
    rounded = (groups / scales).to(FP8).flatten(1)
    return rounded, scales[..., 0].t().contiguous().t()


@cache
def works(scaling: Scaling, device: torch.device, even: bool) -> bool:
    """True if the product is correct on this device, for inputs that are (``even``) a multiple of
    four blocks or not; logs the reason if not. Older versions of torch reject columns of scales
    that are padded to 16 bytes, which newer versions require."""
    return passes(
        lambda: too_far(largest_error(scaling, device, even), 0.05),
        "weights in fp8 are decoded for each product",
    )


def largest_error(scaling: Scaling, device: torch.device, even: bool) -> float:
    """The largest difference from the product of the rounded numbers, for results of magnitude
    1."""
    generator = torch.Generator().manual_seed(0)
    rows, outputs, inputs = 68, 272, (_PADDED if even else _PADDED + 1) * _BLOCK
    weight = torch.randn(outputs, inputs, generator=generator).to(device, FP8)
    each = torch.rand(-(-outputs // _BLOCK), inputs // _BLOCK, generator=generator).to(device)
    if scaling == "rows":
        each = each[:, :1].expand(each.shape)
    scales = (each + 0.1).repeat_interleave(_BLOCK, dim=0)[:outputs].contiguous()
    codes = GroupedCodes(weight, scales, None, _BLOCK)
    x = torch.randn(rows, inputs, generator=generator).to(device, torch.bfloat16)
    rounded, own = rounded_rows(x, scaling)
    actual = torch._scaled_mm(
        rounded, weight.t(), own, weight_scales(codes, scaling), out_dtype=torch.bfloat16
    )
    wide = (rounded.float().unflatten(1, (own.shape[1], -1)) * own[..., None]).flatten(1)
    dense = codes.values()
    size = dense.norm(dim=1).max()
    difference = (actual.float() - wide @ dense.t()) / size
    return float(difference.abs().nan_to_num(torch.inf).max())
