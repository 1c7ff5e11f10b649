"""The rows of a step's plan one by one, as its columns were made of them."""

from __future__ import annotations

from itertools import islice

from tandem.shared.engine.plan import SequenceStep, StepPlan


def rows_of(plan: StepPlan) -> list[SequenceStep]:
    """Rows without new blocks have no ``first_block``."""
    columns = plan.columns
    tokens, masked = iter(columns.tokens), set(columns.masked)
    rows = []
    for row, key in enumerate(columns.sequence_id):
        first, blocks = columns.blocks.get(row, (0, []))
        top, targets = columns.prompt_logprobs.get(row, (None, ()))
        rows.append(
            SequenceStep(
                key,
                [*islice(tokens, columns.count[row])],
                columns.start[row],
                blocks,
                columns.sample[row],
                top,
                targets,
                key in masked,
                columns.pool.get(row),
                first,
            )
        )
    return rows
