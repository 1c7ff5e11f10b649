"""The choice of the next free block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.kv.free_blocks import FreeBlocks


def take(free: FreeBlocks, count: int, after: int | None = None) -> list[int]:
    blocks: list[int] = []
    for _ in range(count):
        after = free.take(after)
        blocks.append(after)
    return blocks


def consecutive(blocks: list[int]) -> bool:
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def test_sequences_that_grow_in_turn_stay_in_one_piece() -> None:
    free = FreeBlocks(320)
    sequences = [take(free, 8) for _ in range(20)]
    for _ in range(8):
        for sequence in sequences:
            sequence += take(free, 1, sequence[-1])
    assert all(consecutive(sequence) for sequence in sequences)


def test_a_long_sequence_is_in_one_piece() -> None:
    assert consecutive(take(FreeBlocks(100), 99))


def test_what_one_sequence_gave_back_is_taken_in_its_order() -> None:
    free = FreeBlocks(33)
    take(free, 20)
    given_back = take(free, 9, after=19)
    take(free, 4)
    for block in reversed(given_back):
        free.add(block)
    assert take(free, 9) == given_back


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 80)), max_size=200))
def test_each_block_is_held_once(size: int, operations: list[tuple[bool, int]]) -> None:
    free, in_use = FreeBlocks(size), set[int]()
    for taking, number in operations:
        if taking and len(free):
            block = free.take(number)
            assert block not in in_use and 0 <= block < size
            in_use.add(block)
        elif not taking and in_use:
            block = sorted(in_use)[number % len(in_use)]
            in_use.remove(block)
            free.add(block)
        assert len(free) == size - len(in_use)
        assert all((block in free) != (block in in_use) for block in range(size))
    assert sorted(take(free, len(free))) == [b for b in range(size) if b not in in_use]
