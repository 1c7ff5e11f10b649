"""Compute kernels behind one boundary, ``operators.py``: plain torch, CPU and GPU side by side.

Nothing here imports the rest of the package.
"""
