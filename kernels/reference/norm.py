"""Root-mean-square norms in plain torch."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dimension; sums are fp32."""
    if _composed(x):
        return _compose_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of both, and the sum."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def head_rms_norm(x_THD: torch.Tensor, weight_HD: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head, with a weight of its own."""
    if _composed(x_THD):
        return _compose_norm(x_THD, weight_HD, eps)
    return F.rms_norm(x_THD, (x_THD.shape[-1],), None, eps) * weight_HD


def _composed(x: torch.Tensor) -> bool:
    """True if torch would compose its norm of eight operators, most of them as large as x: it has a
    fused kernel only on GPUs. ``_compose_norm`` needs fewer, and less memory: in bf16, torch takes
    twenty times as long for the rows of a prompt."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _compose_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * weight / sqrt(mean(x^2) + eps)`` in fp32, rounded once."""
    scale, floor = _norm_constants(x.shape[-1], eps)
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    size.mul_(scale).hypot_(floor)
    if wide is x:
        return (x * weight).div_(size)
    return wide.mul_(weight).div_(size).to(x.dtype)


@cache
def _norm_constants(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The constants as tensors, because torch takes longer to convert a number than to multiply."""
    return torch.tensor(size**-0.5), torch.tensor(eps**0.5)
