"""Batches of rows without a rank that keeps state between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import SequenceStep, SlotLimits, StepColumns
from tandem.shared.engine.rank.slots import Slots
from tandem.shared.engine.rank.step_inputs import StepInputs
from tandem.shared.models.batch import ForwardBatch

OPERATORS = Operators()


def build_batch(
    rows: Sequence[SequenceStep],
    block_size: int,
    device: torch.device,
    output_rows: Sequence[int] | None = None,
    *,
    batched_decode: bool = False,
    operators: Operators = OPERATORS,
) -> ForwardBatch:
    """The batch of rows with whole block tables, of sequences that may occur several times.
    ``output_rows`` defaults to the last row of each."""
    limits = SlotLimits(len(rows), max(len(row.blocks) for row in rows))
    inputs = StepInputs(
        Slots(limits, device),
        block_size,
        operators,
        batched_decode=batched_decode,
        one_by_one=True,
    )
    outputs = last_rows(rows) if output_rows is None else output_rows
    return inputs.batch(StepColumns.of(rows), outputs).forward


def last_rows(rows: Sequence[SequenceStep]) -> list[int]:
    """The number of the last row of each sequence."""
    return [end - 1 for end in accumulate(len(row.tokens) for row in rows)]
