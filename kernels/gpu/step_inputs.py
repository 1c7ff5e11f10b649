"""Triton kernel for the inputs of a step: new blocks enter the tables, placeholders become tokens.

    inputs [4, T]   changes [E, 2]   tables [N, B]   last_tokens [N]   ->   staged [3, T]

The first programs copy inputs, the others enter changes; both in one launch, since neither reads
what the other writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct

_BLOCK = 256
# Options of compilation.
OPTIONS = {"num_warps": 4}


def stage_inputs(
    inputs_4T: torch.Tensor,
    changes_E2: torch.Tensor,
    tables_NB: torch.Tensor,
    last_tokens_N: torch.Tensor,
    staged_3T: torch.Tensor,
) -> None:
    """See ``StageInputs``."""
    for each in (inputs_4T, changes_E2, tables_NB, last_tokens_N):
        assert each.dtype == torch.int32 and each.is_contiguous(), (each.dtype, each.stride())
    rows, changes = inputs_4T.shape[1], len(changes_E2)
    assert staged_3T.dtype == torch.int64 and staged_3T.stride(1) == 1
    row_programs = cdiv(rows, _BLOCK)
    grid = (row_programs + cdiv(changes, _BLOCK),)
    _stage[grid](
        inputs_4T,
        changes_E2,
        tables_NB,
        last_tokens_N,
        staged_3T,
        rows,
        changes,
        row_programs,
        staged_3T.stride(0),
        BLOCK=_BLOCK,
        **OPTIONS,
    )


@direct
@triton.jit(do_not_specialize=["rows", "changes", "row_programs", "stride"])
def _stage(
    inputs_4T: tl.tensor,
    changes_E2: tl.tensor,
    tables: tl.tensor,
    last_tokens: tl.tensor,
    staged_3T: tl.tensor,
    rows: tl.tensor,
    changes: tl.tensor,
    row_programs: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy ``BLOCK`` rows of inputs, or enter ``BLOCK`` changes."""
    program = tl.program_id(0)
    if program < row_programs:
        offs = program * BLOCK + tl.arange(0, BLOCK)
        mask = offs < rows
        token = tl.load(inputs_4T + offs, mask=mask, other=0)
        owner = tl.load(inputs_4T + 3 * rows + offs, mask=mask, other=0)
        last = tl.load(last_tokens + owner, mask=mask & (token < 0), other=0)
        tl.store(staged_3T + offs, tl.where(token < 0, last, token).to(tl.int64), mask=mask)
        for part in tl.static_range(1, 3):
            value = tl.load(inputs_4T + part * rows + offs, mask=mask, other=0)
            tl.store(staged_3T + part * stride + offs, value.to(tl.int64), mask=mask)
    else:
        offs = (program - row_programs) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < changes
        place = tl.load(changes_E2 + 2 * offs, mask=mask, other=0)
        block = tl.load(changes_E2 + 2 * offs + 1, mask=mask, other=0)
        tl.store(tables + place, block, mask=mask)
