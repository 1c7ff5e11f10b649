"""The cache has its memory before it is written: nothing in it changes, and no step waits."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from tandem.shared.kv import backing
from tandem.shared.kv.backing import Backing

BLOCK_SIZE = 16
HEADS, BLOCKS, DIM = 2, 100, 32


def sides(count: int = 3) -> list[torch.Tensor]:
    """Tensors of a pool whose stretch is ten blocks."""
    return [torch.zeros(HEADS, BLOCKS * BLOCK_SIZE, DIM) for _ in range(count)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "HUGE_PAGE", 10 * BLOCK_SIZE * DIM * 4)


def test_half_a_stretch_ahead_of_what_is_used_has_memory() -> None:
    ranges: list[tuple[int, int]] = []
    tensors = sides()
    backed = Backing(tensors, BLOCK_SIZE, lambda address, size: ranges.append((address, size)))
    backed.back()
    assert not ranges  # an idle node takes nothing

    for used, expected in ((0, 10), (4, 10), (5, 20), (14, 20), (37, 50), (99, BLOCKS)):
        backed.reach(used)
        backed.back()
        for side in tensors:
            for head in side:
                _assert_covered(ranges, head[: expected * BLOCK_SIZE])
        beyond = sum(size for _, size in ranges)
        assert beyond <= HEADS * len(tensors) * _bytes(expected) + len(ranges) * mmap.PAGESIZE


def test_the_newest_block_of_each_table_counts() -> None:
    ranges: list[tuple[int, int]] = []
    backed = Backing(sides(1), BLOCK_SIZE, lambda address, size: ranges.append((address, size)))
    backed.reach_all([[], [3, 1], [2, 27]])
    backed.back()
    assert sum(size for _, size in ranges) >= HEADS * _bytes(40)
    backed.reach_all([])
    backed.back()


def test_what_is_written_stays_while_memory_comes() -> None:
    """As this system does it, beside a thread that writes."""
    (side,) = sides(1)
    backed = Backing([side], BLOCK_SIZE)
    side[:, ::3] = 7
    writer = threading.Thread(target=lambda: side[:, 1::3].fill_(8))
    writer.start()
    backed.reach(BLOCKS - 1)
    backed.back()
    writer.join(30)
    assert (side[:, ::3] == 7).all() and (side[:, 1::3] == 8).all() and (side[:, 2::3] == 0).all()


def test_it_works_in_a_thread_of_its_own() -> None:
    done = threading.Event()
    count = 0

    def populate(address: int, size: int) -> None:
        nonlocal count
        count += 1
        if count == HEADS * 2:
            done.set()

    backed = Backing(sides(1), BLOCK_SIZE, populate)
    backed.start()
    backed.reach(5)
    assert done.wait(30)


def test_without_system_support_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def populate(address: int, size: int) -> None:
        failed.set()
        raise OSError(22, "Invalid argument")

    backed = Backing(sides(1), BLOCK_SIZE, populate)
    backed.start()
    backed.reach(0)
    assert failed.wait(30)
    backed.reach(50)  # no error, and no thread works


def _bytes(blocks: int) -> int:
    return blocks * BLOCK_SIZE * DIM * 4


def _assert_covered(ranges: list[tuple[int, int]], part: torch.Tensor) -> None:
    at, end = part.data_ptr(), part.data_ptr() + part.numel() * 4
    for address, size in sorted(ranges):
        if address <= at < address + size:
            at = address + size
    assert at >= end
