"""Compute kernels, each beside its plain torch reference. Nothing here imports the package."""
