"""Slots of live sequences, and the inputs of steps that are built from them."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import (
    PLACEHOLDER,
    PooledRow,
    SequenceStep,
    SlotLimits,
    StepColumns,
)
from tandem.shared.engine.rank import step_inputs
from tandem.shared.engine.rank.slots import Slots
from tandem.shared.engine.rank.step_inputs import NO_SLOT, StaticInputs, StepInputs, host_rows

CPU = torch.device("cpu")
BLOCK = 4


def row(key: int, count: int, start: int, blocks: list[int], first: int = 0) -> SequenceStep:
    tokens = [100 * key + start + i for i in range(count)]
    return SequenceStep(key, tokens, start, blocks, True, first_block=first)


def inputs_of(slots: Slots) -> StepInputs:
    return StepInputs(slots, BLOCK, Operators(), batched_decode=True, one_by_one=False)


def test_a_slot_lasts_for_the_life_of_its_sequence() -> None:
    slots = Slots(SlotLimits(2, 3), CPU)
    slots.place(StepColumns.of([row(7, 1, 0, [5]), row(8, 1, 0, [6])]))
    first = slots[7]
    slots.place(StepColumns.of([row(7, 1, 4, [9, 2], 1), row(8, 1, 1, [])]))
    assert slots[7] == first and slots.tables[first].tolist() == [5, 9, 2]
    slots.remove([7, 99])
    slots.place(StepColumns.of([row(9, 1, 0, [1])]))
    assert slots[9] == first and slots.tables[first, 0] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1, 1, 0, [0]), row(2, 1, 0, [0]), row(3, 1, 0, [0])], "all 2 slots are taken"),
        ([row(1, 1, 0, [0, 1, 2, 3])], "4 blocks, more than the 3"),
    ],
)
def test_plans_beyond_the_limits_are_refused(rows: list[SequenceStep], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Slots(SlotLimits(2, 3), CPU).place(StepColumns.of(rows))


def test_a_mixed_step() -> None:
    slots = Slots(SlotLimits(4, 4), CPU)
    slots.place(StepColumns.of([row(1, 1, 0, [3, 1]), row(2, 1, 0, [7])]))
    slots.last_tokens[slots[1]] = 42
    decode = SequenceStep(1, [PLACEHOLDER], 6, [], True)
    rows = [row(2, 3, 2, [5], 1), decode, row(3, 1, 0, [8])]
    batch = inputs_of(slots).batch(StepColumns.of(rows), [2, 3, 4]).forward
    assert batch.tokens.tolist() == [202, 203, 204, 42, 300]
    assert batch.positions.tolist() == [2, 3, 4, 6, 0]
    metadata = batch.attention
    assert metadata.slots.tolist() == [30, 31, 20, 6, 32]
    assert batch.output_rows is not None and batch.output_rows.tolist() == [2, 3, 4]
    assert metadata.decodes is not None
    assert metadata.decodes.rows.tolist() == [[3, slots[1], 7], [4, slots[3], 1]]
    assert metadata.decodes.tables.data_ptr() == slots.tables.data_ptr()
    [chunk] = metadata.sequences
    assert (chunk.rows, chunk.start, list(chunk.block_table)) == (slice(0, 3), 2, [7, 5])


def test_few_decoding_rows_are_flattened_like_many(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(SlotLimits(9, 6), CPU)
    rows = StepColumns.of(
        [row(key, 1, 3 * key, list(range(7 * key, 7 * key + 6))) for key in range(8)]
    )
    row_slots, _ = slots.place(rows)
    few = host_rows(rows, row_slots, slots, BLOCK)
    monkeypatch.setattr(step_inputs, "_FEW", 0)
    for mine, theirs in zip(few, host_rows(rows, row_slots, slots, BLOCK), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_slots_that_draw_begin_an_array(count: int) -> None:
    """As those of eager steps, for which the sampler's kernels are compiled."""
    slots = Slots(SlotLimits(count, 3), CPU)
    inputs, static = inputs_of(slots), StaticInputs.allocate(8, CPU)
    rows = StepColumns.of([row(key, 1, 0, [key]) for key in range(count)])
    slots_R = inputs.fill(rows, static, count).on_device
    assert slots_R.tolist() == [slots[key] for key in range(count)]
    assert slots_R.storage_offset() * slots_R.itemsize % 16 == 0


def test_padding_of_a_graph_has_no_length_and_no_place() -> None:
    """Nor what the rows before it left there."""
    slots = Slots(SlotLimits(4, 3), CPU)
    inputs, static = inputs_of(slots), StaticInputs.allocate(8, CPU)
    rows = [row(key, 1, 5, [key, 7 - key]) for key in range(3)]
    inputs.fill(StepColumns.of(rows), static, 4)
    inputs.fill(StepColumns.of(rows[1:2]), static, 4)
    assert static.staged[:, 1:].tolist() == [[0] * 7, [0] * 7, [NO_SLOT] * 7]
    assert static.decodes.tolist() == [[0, slots[1], 6]] + [[0] * 3] * 7


@given(data=st.data())
def test_a_gpu_gets_what_a_cpu_gets(data: st.DataObject) -> None:
    """Staged by torch's reference here; the kernel is compared with that."""
    on_cpu, staged = (Slots(SlotLimits(5, 6), CPU) for _ in range(2))
    staged.tables = torch.zeros_like(staged.tables)  # as on a device
    tables: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = []
        for key in sorted(data.draw(st.sets(st.integers(1, 5), min_size=1))):
            count, start = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 18))
            end = max(tables.get(key, 0), -(-(start + count) // BLOCK))
            first = tables.get(key, 0)
            size = end - first
            blocks = data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
            tables[key] = end
            each = row(key, count, start, blocks, first)
            if count == 1 and first and data.draw(st.booleans()):
                each = each._replace(tokens=[PLACEHOLDER])
            rows.append(each)
        columns = StepColumns.of(rows)
        row_slots, changes = staged.place(columns)
        for slots in (on_cpu, staged):
            slots.last_tokens[:] = torch.arange(5) + 50
        expected, drawing, targets = inputs_of(on_cpu).batch(columns)
        inputs = inputs_of(staged)
        host = host_rows(columns, row_slots, staged, BLOCK)
        actual, slots_drawn, staged_targets = inputs._on_gpu(
            columns, host, None, drawing.on_host, changes, True
        )
        assert slots_drawn.on_device.tolist() == drawing.on_host
        assert torch.equal(staged_targets, targets)
        for mine, theirs in zip(
            (actual.tokens, actual.positions, actual.attention.slots),
            (expected.tokens, expected.positions, expected.attention.slots),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
        np.testing.assert_array_equal(staged.tables, on_cpu.tables)
        if actual.attention.decodes is not None:
            assert expected.attention.decodes is not None
            assert torch.equal(actual.attention.decodes.rows, expected.attention.decodes.rows)
        chunks = [each for each in rows if len(each.tokens) > 1]
        assert (actual.attention.chunks is None) == (not chunks)
        if actual.attention.chunks is not None:
            starts = actual.attention.chunks.chunks[:, 3].tolist()
            assert starts == [each.start for each in chunks]


@pytest.mark.parametrize("staged", [False, True])
def test_pairs_of_texts_have_segments(monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    """On a GPU they are in the step's only upload."""
    slots = Slots(SlotLimits(3, 2), CPU)
    inputs = inputs_of(slots)
    upload = Mock(wraps=inputs._upload)
    monkeypatch.setattr(inputs, "_upload", upload)
    if staged:
        slots.tables, slots.on_cpu = torch.zeros_like(slots.tables), False
        monkeypatch.setattr(torch, "from_numpy", None)
    rows = [row(1, 5, 0, [0, 1]), row(2, 3, 0, [2]), row(3, 4, 0, [3])]
    seconds = (2, 0, 3)
    pairs = [
        one._replace(sample=False, pool=PooledRow("first", classify=True, second_text=second))
        for one, second in zip(rows, seconds, strict=True)
    ]
    segments = inputs.batch(StepColumns.of(pairs)).forward.segments
    assert segments is not None and segments.tolist() == [0, 0, 1, 1, 1] + [0] * 3 + [0, 0, 0, 1]
    single = [one._replace(pool=PooledRow("first")) for one in pairs]
    assert inputs.batch(StepColumns.of(single)).forward.segments is None
    assert upload.call_count == 2 * staged
