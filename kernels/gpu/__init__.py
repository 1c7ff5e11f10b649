"""GPU operators and their Triton kernels."""
