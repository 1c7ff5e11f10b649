"""Kernels, each beside its plain torch reference."""
