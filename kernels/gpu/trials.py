"""Trials of GPU kernels: a kernel that raises or is wrong is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..errors import KernelUnavailableError
from .capability import capability_of

log = logging.getLogger("tandem.kernels")

# Triton compiles kernels for no older GPUs of NVIDIA.
OLDEST_CAPABILITY = (7, 0)


def problem(trial: Callable[[], str]) -> str:
    """The problem that a trial reports or raises; empty if there is none."""
    try:
        return trial()
    except Exception as error:  # Triton and libraries under torch raise errors of many types
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def passes(trial: Callable[[], str], otherwise: str, *, required: bool = False) -> bool:
    """True if a trial succeeds; logs the problem and the consequence ``otherwise``.

    Raises ``KernelUnavailableError`` instead if the kernel is ``required``.
    """
    reason = problem(trial)
    if reason and required:
        raise KernelUnavailableError(reason)
    if reason:
        log.warning("%s: %s", otherwise, reason)
    return not reason


def triton_problem(device: torch.device) -> str:
    """The reason why no Triton kernel can be used on a GPU; empty if they can, or elsewhere.

    Triton compiles kernels on the machine that runs them, and needs a C compiler and a folder from
    which libraries can be loaded.
    """

    def trial() -> str:
        capability = capability_of(device)
        if (0, 0) < capability < OLDEST_CAPABILITY:  # the compiler may abort the process
            has, needs = (".".join(map(str, each)) for each in (capability, OLDEST_CAPABILITY))
            return f"it needs compute capability {needs}, and this GPU has {has}"
        from .triton_probe import probe

        return "" if probe(device) == 1 else "a kernel that it compiles writes a wrong number"

    return problem(trial) if device.type == "cuda" else ""


def too_far(worst: float, limit: float, whose: str = "its") -> str:
    """The problem with results that are ``worst`` off; empty below the limit. NaN is a problem."""
    return "" if worst < limit else f"{whose} results are {worst:g} off"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in relation to results that are larger than one."""
    actual, expected = actual.float(), expected.float()
    error = (actual - expected).abs() / expected.abs().clamp(min=1)
    return float(error.nan_to_num(torch.inf).max())


def row_scales(expected_THD: torch.Tensor) -> torch.Tensor:
    """The largest result of each row, at most one: attention's are means of many values, which are
    small."""
    return expected_THD.float().abs().amax(dim=(1, 2), keepdim=True).clamp(max=1)


def row_error(actual_THD: torch.Tensor, expected_THD: torch.Tensor) -> float:
    """The largest difference, in relation to ``row_scales``."""
    error = (actual_THD.float() - expected_THD.float()).abs() / row_scales(expected_THD)
    return float(error.nan_to_num(torch.inf).max())
