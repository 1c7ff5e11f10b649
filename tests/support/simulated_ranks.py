"""Ranks without a model, which notice a plan that real ones would compute wrongly.

Each slot of the cache holds the tokens up to its own, so a row that reads a slot which something
else has overwritten fails. A draw depends on all tokens before it, as a model's does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.shared.engine.plan import PLACEHOLDER, SamplerSpec, SequenceStep, StepPlan, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import FinishReason, Sequence
from tandem.shared.engine.work import Generate
from tandem.tests.support.step_rows import rows_of

EOS, STOP = 999, 7
FIRST_TOKEN = 100  # of those that end nothing


def draw(tokens: list[int], seed: int) -> int:
    """The token after ``tokens``; one in eleven is a stop token."""
    number = hash((seed, *tokens)) % 1_000_003
    return {0: STOP, 5: EOS}.get(number % 11, FIRST_TOKEN + number % 50)


def expected(
    prompt: list[int], params: SamplingParams, seed: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """The outputs of a sequence, and its finish reason."""
    outputs: list[int] = []
    while True:
        outputs.append(draw(prompt + outputs, seed))
        ends = outputs[-1] == EOS and not params.ignore_eos
        if ends or outputs[-1] in params.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) >= params.max_tokens or len(prompt) + len(outputs) >= max_model_len:
            return outputs, FinishReason.LENGTH


@dataclass
class SimulatedRanks:
    """``broken`` sequences compute values that are not finite; steps with ``poison`` raise."""

    block_size: int
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    specs: dict[int, SamplerSpec] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)  # since the spec came
    broken: set[int] = field(default_factory=set)
    poison: set[int] = field(default_factory=set)
    last_step: int = 0
    failed: bool = False  # the last step

    def run(self, plan: StepPlan) -> StepResult | None:
        """The result of a step; ``None`` if it raises, or is void because the one before did."""
        assert plan.step > self.last_step, "steps run in the order in which they were planned"
        self.last_step = plan.step
        if plan.ahead and self.failed:
            return None
        for key in plan.removed:
            self.specs.pop(key, None)
            self.tables.pop(key, None)
        for spec in plan.added:
            self.specs[spec.sequence_id] = spec
            self.samples[spec.sequence_id] = []
        self.failed = bool(self.poison & {row.sequence_id for row in rows_of(plan)})
        if self.failed:
            return None
        result = StepResult(plan.step)
        for row in rows_of(plan):
            self._compute(row, result)
        return result

    def write(self, table: list[int], tokens: list[int], first: int, end: int) -> None:
        """Fill the slots of positions ``[first, end)``."""
        for position in range(first, end):
            slot = table[position // self.block_size], position % self.block_size
            self.slots[slot] = tuple(tokens[: position + 1])

    def _compute(self, row: SequenceStep, result: StepResult) -> None:
        key = row.sequence_id
        table = self.tables.setdefault(key, [])
        assert not row.blocks or row.first_block == len(table), (
            "the blocks before these are missing, or sent twice"
        )
        table += row.blocks
        drawn = row.tokens == [PLACEHOLDER]
        tokens = self.samples[key][-1:] or [0] if drawn else row.tokens
        history = [*self._read(row), *tokens]
        self.write(table, history, row.start, len(history))
        if key in self.broken:
            result.failed[key] = "not finite"
        elif row.sample:
            spec = self.specs[key]
            outputs = spec.outputs + self.samples[key]
            assert history[len(history) - len(outputs) :] == outputs, "a token was lost"
            self.samples[key].append(draw(history, spec.seed))
            result.sampled[key] = self.samples[key][-1:]

    def _read(self, row: SequenceStep) -> list[int]:
        """The tokens before the row, each of whose slots must hold what led to it."""
        context: tuple[int, ...] = ()
        for position in range(row.start):
            block = self.tables[row.sequence_id][position // self.block_size]
            slot = block, position % self.block_size
            tokens = self.slots.get(slot, ())
            assert tokens[:-1] == context and len(tokens) == position + 1, (
                f"sequence {row.sequence_id}: token {position} is not in slot {slot}"
            )
            context = tokens
        return list(context)


def is_as_expected(one: Sequence, max_model_len: int) -> bool:
    """True if an ended sequence has the tokens that it would have had alone."""
    if not isinstance(one.work, Generate):
        reasons = (FinishReason.COMPUTED, FinishReason.CANCELLED, FinishReason.ERROR)
        return one.finish_reason in reasons and not one.outputs
    outputs, reason = expected(one.prompt, one.work.params, one.work.seed, max_model_len)
    if one.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        return one.outputs == outputs[: len(one.outputs)]
    return (one.outputs, one.finish_reason) == (outputs, reason)
