"""Compute kernels behind one boundary, ``operators.py``: in plain torch, for CPUs and for GPUs.

Nothing here imports the rest of the package.
"""
