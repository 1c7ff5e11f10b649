"""Triton product of a few rows with an unquantised weight, in one launch.

    x [R, I]   weight [O, I]   bias [O]   ->   out [R, O], all of one dtype of 16 bits

Such a product takes as long as its weight is read, and a small weight as long as a launch and a way
to memory and back. A program takes 8 outputs, of which even small weights have as many as a GPU has
processors. Its warps divide the inputs. All that they take in a step is on its way before the first
product, straight into the registers in which the tensor cores want it: the 8 outputs are the
columns of their product, and x's rows the 16 rows.

Sums are in fp32. How inputs are divided depends on the weight alone, and tensor cores add the same
for each row: a row's result depends neither on other rows nor on their number.

R rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, direct, next_power_of_2
from .paged_decode import processors

# Rows of the kernels that are compiled: a thread has one of 8, or two of 16.
ROWS = (8, 16)
VECTOR_BYTES = 16
# Outputs of a program.
_OUTPUTS = 8
# A warp takes _SUMS x _SPANS x 32 inputs in a step; with two sums, fewer products wait for others.
_SUMS, _SPANS = 2, 4
_WARP_INPUTS = _SUMS * _SPANS * 32
# Warps that keep a processor's share of the memory busy, and the fewest and most of a program.
_BUSY = 16
_WARPS = 4, 16


def takes(x_RI: torch.Tensor) -> bool:
    """True if a kernel that is compiled for a weight can read these rows."""
    if x_RI.dim() != 2 or not 0 < len(x_RI) <= max(ROWS):
        return False
    return x_RI.is_contiguous() and x_RI.data_ptr() % VECTOR_BYTES == 0


def warps_of(outputs: int, inputs: int, device: torch.device) -> int:
    """Warps of a program: as many as keep the GPU busy, of those for which there are inputs."""
    share = _BUSY * processors(device) // cdiv(outputs, _OUTPUTS)
    fewest, most = _WARPS
    share = min(max(share, fewest), most, cdiv(inputs, _WARP_INPUTS))
    return next_power_of_2(share)


def multiply(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, warps: int
) -> torch.Tensor:
    """The product [R, O] by programs of so many warps. Rows of x and of the weight are whole
    vectors of 16 bytes."""
    (rows, inputs), outputs = x_RI.shape, len(weight_OI)
    assert takes(x_RI) and weight_OI.is_contiguous() and weight_OI.shape[1] == inputs
    out_RO = x_RI.new_empty(rows, outputs)
    _multiply_skinny[(cdiv(outputs, _OUTPUTS),)](
        x_RI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_RO,
        rows,
        outputs,
        int(bias_O is not None),
        INPUTS=inputs,
        ROWS=next(size for size in ROWS if rows <= size),
        SPANS=_SPANS,
        GROUPS=_SUMS * warps,
        num_warps=warps,
    )
    return out_RO


@triton.jit
def _places(
    A: tl.constexpr, SPANS: tl.constexpr, GROUPS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The row, of 8 A, and the first input of each of [A, spans, groups, 8, 4] vectors."""
    place = tl.arange(0, A * SPANS * GROUPS * 32)
    span = place // 32 % GROUPS * SPANS + place // (GROUPS * 32) % SPANS
    return place // (SPANS * GROUPS * 32) * 8 + place % 32 // 4, span * 32 + place % 4 * 8


@triton.jit
def _step(
    acc: tl.tensor,
    x_at: tl.tensor,
    x_mask: tl.tensor,
    weight_at: tl.tensor,
    weight_mask: tl.tensor,
    number_at: tl.tensor,
    never: tl.tensor,
    SPANS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Add the products of some inputs."""
    GROUPS: tl.constexpr = acc.shape[0]
    if MASKED:
        weight = tl.load(
            weight_at, mask=weight_mask[:, None], other=0.0, eviction_policy="evict_first"
        )
    else:
        weight = tl.load(weight_at, eviction_policy="evict_first")
    x = tl.load(x_at, mask=x_mask[:, None], other=0.0)
    # To save registers, ptxas would read each number just before its product, and wait for it. But
    # it moves no reads behind a barrier, and no sums ahead of what they begin with.
    tl.debug_barrier()
    acc += tl.load(number_at, mask=never, other=0.0).to(tl.float32)
    # [spans, groups, output, t, step, upper, second]
    weight = weight.reshape(SPANS, GROUPS, 8, 4, 2, 2, 2).permute(1, 0, 4, 5, 3, 6, 2)
    weight = weight.reshape(GROUPS, SPANS * 32, 8)
    # [halves, spans, groups, row, t, step, upper, second]
    x = x.reshape(2, SPANS, GROUPS, 8, 4, 2, 2, 2).permute(2, 0, 3, 1, 5, 6, 4, 7)
    return tl.dot(x.reshape(GROUPS, 16, SPANS * 32), weight, acc)


@direct
@triton.jit(
    do_not_specialize=["rows", "outputs", "has_bias"], do_not_specialize_on_alignment=["bias_O"]
)
def _multiply_skinny(
    x_RI: tl.tensor,
    weight_OI: tl.tensor,
    bias_O: tl.tensor,
    out_RO: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    has_bias: tl.tensor,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Multiply all rows with 8 outputs."""
    STEP: tl.constexpr = GROUPS * SPANS * 32
    MASKED: tl.constexpr = INPUTS % STEP != 0
    # Everything is read in two dimensions, those of threads and of a thread's own numbers, so that
    # Triton spreads it over threads, then warps, then registers, as the tensor cores want it.
    first = tl.program_id(0) * 8
    output, of_output = _places(1, SPANS, GROUPS)
    output = tl.minimum(output, outputs - 1 - first)
    vector = tl.arange(0, 8)[None, :]
    weight_at = weight_OI + first.to(tl.int64) * INPUTS
    weight_at = weight_at + (output * INPUTS + of_output)[:, None] + vector
    row, of_row = _places(2, SPANS, GROUPS)
    x_at = x_RI + (row * INPUTS + of_row)[:, None] + vector
    # Nothing is read where rows are not compiled.
    row_mask = (row < rows) & (row < ROWS)

    output = first + tl.arange(0, 8)
    bias = tl.load(bias_O + output, mask=output < outputs * has_bias, other=0.0)
    acc = tl.zeros((GROUPS, 16, 8), tl.float32)
    for start in range(0, INPUTS, STEP):
        x_mask = row_mask
        if MASKED:
            x_mask = x_mask & (of_row < INPUTS - start)
        acc = _step(
            acc,
            x_at + start,
            x_mask,
            weight_at + start,
            of_output < INPUTS - start,
            bias_O,
            rows < 0,
            SPANS,
            MASKED,
        )
    total = tl.sum(acc, axis=0) + bias.to(tl.float32)[None, :]
    row = tl.arange(0, 16)
    out_at = out_RO + row[:, None] * outputs + output[None, :]
    out_mask = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out_at, total.to(out_RO.dtype.element_ty), mask=out_mask)
