"""Kernels for CPUs, compiled by numba. Only ``jit`` can be imported without numba."""
