"""Batches of rows without a rank that keeps state between them."""

from __future__ import annotations

from collections.abc import Sequence

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
    """The batch of rows with whole block tables, of sequences that may occur several times."""
    limits = SlotLimits(len(rows), max(len(row.blocks) for row in rows))
    inputs = StepInputs(
        Slots(limits, device),
        block_size,
        operators,
        batched_decode=batched_decode,
        one_by_one=True,
    )
    return inputs.batch(StepColumns.of(rows), output_rows)
