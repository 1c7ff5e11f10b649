"""How many splits decoding rows have, and how many partial results a step. Needs neither Triton nor
a GPU, since memory is planned before there is one.

Programs attend to splits in turns: to each, one for each KV head or block of heads.
"""

from __future__ import annotations

# The most splits of a row.
MAX_SPLITS = 64
# Programs for each processor of a GPU that is busy with one row of paged attention.
ROW_PROGRAMS = 2
# About as many splits as a step over latents has for each program that the GPU runs at once. Fewer
# spread rows of any lengths less evenly; more take more memory, and its time.
_SPLITS_PER_PROGRAM = 8


def max_splits(programs: int, programs_per_split: int) -> int:
    """The most splits of a row: as many as give a GPU that runs ``programs`` at once work if the
    row is alone."""
    return min(MAX_SPLITS, -(-programs // programs_per_split))


def step_splits(programs: int, programs_per_split: int) -> int:
    """About the most splits of a step over latents, if rows of one split are left out."""
    return _SPLITS_PER_PROGRAM * -(-programs // programs_per_split)


def num_partials(num_rows: int, max_splits: int, step_splits: int) -> int:
    """The most partial results of a step, which rows of one split do not have.

    The number of a row's splits is rounded, so those of two or more have at least three quarters of
    the tokens that as many whole splits would have.
    """
    return min(num_rows * max_splits, -(-4 * step_splits // 3)) if max_splits > 1 else 0
