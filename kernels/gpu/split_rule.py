"""Limits on the splits of decoding rows and on the partial results of a step. Needs neither Triton
nor a GPU, since memory is also estimated where there is none.

Each split is computed by one program for each KV head, or for each block of heads.
"""

from __future__ import annotations

# The most splits of a row.
MAX_SPLITS = 64
# Programs for each processor of the GPU if paged attention has only one row.
ROW_PROGRAMS = 2
# Splits of a step over latents for each program that the GPU runs at once, as an approximate limit.
# With fewer, the load is less even; with more, partial results take more memory and bandwidth.
_SPLITS_PER_PROGRAM = 8


def max_splits(programs: int, programs_per_split: int) -> int:
    """The most splits of a row: enough to keep a GPU busy that runs ``programs`` at once if the row
    is alone."""
    return min(MAX_SPLITS, -(-programs // programs_per_split))


def step_splits(programs: int, programs_per_split: int) -> int:
    """The approximate limit on the splits of a step over latents, without rows of one split."""
    return _SPLITS_PER_PROGRAM * -(-programs // programs_per_split)


def num_partials(num_rows: int, max_splits: int, step_splits: int) -> int:
    """The most partial results of a step; rows of one split have none.

    The number of a row's splits is rounded to the nearest. So a row of two splits or more has at
    least three quarters of the tokens of as many full splits.
    """
    return min(num_rows * max_splits, -(-4 * step_splits // 3)) if max_splits > 1 else 0
