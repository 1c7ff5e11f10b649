"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch

from ..signatures import CosSin


def apply_rotary(x_THD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate the first half of the rotated dimensions against the second.

    cos and sin are fp32 and equal in both halves, except that sin is negated in the first half. So
    products are fp32 and rounded once. Dimensions beyond their width are unchanged.
    """
    cos_T1D, sin_T1D = cos_sin
    dim = cos_T1D.shape[-1]
    if dim < x_THD.shape[-1]:
        rotated = apply_rotary(x_THD[..., :dim], cos_sin) if dim else x_THD[..., :0]
        return torch.cat([rotated, x_THD[..., dim:]], dim=-1)
    wide = x_THD.float()
    swapped = wide.roll(dim // 2, dims=-1)
    return (wide * cos_T1D).addcmul_(swapped, sin_T1D).to(x_THD.dtype)
