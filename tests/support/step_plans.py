"""Plans of steps without a scheduler: sequences that come, decode and leave."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from tandem.shared.engine.plan import (
    PLACEHOLDER,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    StepPlan,
    StepResult,
)
from tandem.shared.engine.rank.runner import ModelRunner

NUM_BLOCKS = 64
PARAMS = (
    RankSampling(temperature=0.0),
    RankSampling(temperature=0.8, top_p=0.9),
    RankSampling(temperature=1.0, top_k=20, frequency_penalty=0.5),
)
# As above, without filters.
UNFILTERED = RankSampling(temperature=0.0), RankSampling(frequency_penalty=0.5)


class Streams:
    """Sequences with the blocks that a head would give them; at most one more than ``max_rows``.
    They draw by ``params`` in turn. Prompts have a token, or sometimes ``chunk``."""

    def __init__(
        self,
        seed: int,
        *,
        block_size: int,
        max_rows: int,
        params: Sequence[RankSampling] = PARAMS,
        chunk: int = 9,
    ) -> None:
        self.chunk = chunk
        self.params = params
        self.block_size = block_size
        self.max_rows = max_rows
        self.random = random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.lengths: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.sent: dict[int, int] = {}
        self.last_id = 0
        self.step = 0

    def plans(self, steps: int) -> Iterator[StepPlan]:
        for _ in range(steps):
            self.step += 1
            removed = [each for each in list(self.lengths) if self.random.random() < 0.15]
            for each in removed:
                self.free += self.tables.pop(each)
                del self.lengths[each], self.sent[each]
            room = self.max_rows + 1 - len(self.lengths)
            new = [self._new() for _ in range(min(room, self.random.choice((0, 0, 0, 0, 1, 3))))]
            rows = [self._row(each, prompt=each in new) for each in self.lengths]
            specs = [SamplerSpec(each, self.params[each % len(self.params)], each) for each in new]
            yield StepPlan.of(self.step, rows, specs, removed, ahead=self.step > 1)

    def _new(self) -> int:
        self.last_id += 1
        self.lengths[self.last_id] = 0
        self.tables[self.last_id], self.sent[self.last_id] = [], 0
        return self.last_id

    def _row(self, each: int, *, prompt: bool) -> SequenceStep:
        start = self.lengths[each]
        count = self.random.choice((1, 1, self.chunk)) if prompt else 1
        tokens = [self.random.randrange(500) for _ in range(count)] if prompt else [PLACEHOLDER]
        self.lengths[each] += count
        while len(self.tables[each]) * self.block_size < self.lengths[each]:
            self.tables[each].append(self.free.pop())
        first, self.sent[each] = self.sent[each], len(self.tables[each])
        return SequenceStep(each, tokens, start, self.tables[each][first:], True, first_block=first)


def drawn(result: StepResult) -> dict[int, int]:
    assert not result.failed
    return {each: token for each, [token] in result.sampled.items()}


def drawn_late(runner: ModelRunner, plans: Iterable[StepPlan]) -> list[dict[int, int]]:
    """The tokens of steps, each of which is collected once the next one is launched."""
    tokens, last = list[dict[int, int]](), None
    for plan in plans:
        step = runner.launch(plan)
        if last is not None:
            tokens.append(drawn(runner.collect(last)))
        last = step
    return tokens if last is None else [*tokens, drawn(runner.collect(last))]
