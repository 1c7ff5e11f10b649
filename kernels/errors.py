"""Errors of kernels."""

from __future__ import annotations


class KernelUnavailableError(RuntimeError):
    """Kernels cannot be compiled on this machine, or give wrong results."""
