"""Kernels for CPUs, compiled by numba. Where numba may be missing, import ``jit`` alone."""
