"""Received prompts that lack KV outside of a layer's window: no step reads it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Generate
from tandem.shared.kv.block_pool import OutOfBlocksError
from tandem.tests.shared.engine.scheduling.schedulers import make, reserve, run_step
from tandem.tests.support.step_rows import rows_of

SIZE = 4


class WindowedLayer:
    """The tokens in the slots of a layer with a window, followed for every sequence."""

    def __init__(self, scheduler: Scheduler, window: int) -> None:
        self.scheduler = scheduler
        self.window = window
        self.sequences: dict[int, Sequence] = {}
        self.tables: dict[int, list[int]] = {}
        self.slots: dict[tuple[int, int], object] = {}

    def step(self) -> bool:
        """Run one step; each row must find every token of the prefix that it attends to."""
        plan, _ = run_step(self.scheduler)
        for row in rows_of(plan) if plan is not None else []:
            tokens = self.sequences[row.sequence_id].tokens(0, row.start + len(row.tokens))
            table = self.tables.setdefault(row.sequence_id, [])
            if row.blocks:
                table[row.first_block :] = row.blocks
            for position in range(row.start, len(tokens)):
                self.write(table, tokens, position)
                for earlier in range(max(0, position - self.window + 1), position + 1):
                    cached = self.slots.get((table[earlier // SIZE], earlier % SIZE))
                    assert cached == tokens[: earlier + 1], (
                        f"token {position} misses token {earlier}"
                    )
        return plan is not None

    def write(self, table: list[int], tokens: list[int], position: int) -> None:
        self.slots[table[position // SIZE], position % SIZE] = tokens[: position + 1]

    def receive(self, one: Sequence) -> None:
        """Receive what the window shows; the rest of the blocks keeps its former content."""
        end = len(one.prompt) - 1
        try:
            reception = reserve(self.scheduler, one)
        except OutOfBlocksError:
            self.scheduler.add(one)
            return
        start = reception.resume_at - self.window + 1
        first = max(one.computed, min(start, end - 1))
        for position in range(one.computed, end):
            if position < first:
                self.slots.pop((one.block_table[position // SIZE], position % SIZE), None)
            else:
                self.write(one.block_table, one.prompt, position)
        reception.commit(end, first)


def test_a_branch_in_the_middle_of_a_received_prompt_takes_only_whole_blocks() -> None:
    layer = WindowedLayer(make(), window=10)
    prompt = list(range(100, 126))
    first = Sequence(1, prompt, Generate(SamplingParams(max_tokens=8)))
    layer.sequences[1] = first
    layer.receive(first)  # from token 16 on
    while layer.step():
        pass
    # The prompt's blocks 4 and 5 and the first of the outputs are whole, but nothing before them.
    for length in (26, 20, 9):
        again = Sequence(2, [*prompt[:length], 7], Generate(SamplingParams(max_tokens=1)))
        layer.scheduler.tables.match_prefix(again)
        assert again.computed == 0
    # Once another sequence has computed the beginning, they are found behind it.
    other = Sequence(3, [*prompt[:17], 7], Generate(SamplingParams(max_tokens=1)))
    layer.sequences[3] = other
    layer.scheduler.add(other)
    while layer.step():
        pass
    again = Sequence(4, [*prompt, 7], Generate(SamplingParams(max_tokens=1)))
    layer.scheduler.tables.match_prefix(again)
    assert again.computed == 24


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_step_reads_what_never_came(data: st.DataObject) -> None:
    """Prompts that share beginnings come and branch off, with further choices, in few blocks."""
    blocks = data.draw(st.integers(8, 16))
    layer = WindowedLayer(make(blocks=blocks), window=data.draw(st.integers(1, 20)))
    for n in range(0, 3 * data.draw(st.integers(2, 8)), 3):
        length = data.draw(st.integers(2, 4 * blocks - 12))
        fork = data.draw(st.integers(0, length))
        prompt = [1] * fork + [2 + n] * (length - fork)
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 10)))
        choices = [
            Sequence(n + i, prompt, Generate(params)) for i in range(data.draw(st.integers(1, 3)))
        ]
        choices[0].siblings = choices[1:]
        layer.sequences |= {one.sequence_id: one for one in choices}
        if data.draw(st.booleans()):
            layer.receive(choices[0])
        else:
            layer.scheduler.add(choices[0])
        for _ in range(data.draw(st.integers(0, 12))):
            layer.step()
    for _ in range(2000):
        if not layer.scheduler.has_work:
            break
        layer.step()
    assert layer.scheduler.idle and layer.scheduler.pool.counts().available == blocks
