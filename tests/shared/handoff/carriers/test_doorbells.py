"""The pipes of a shared-memory connection."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from tandem.shared.handoff.carriers.doorbells import (
    MAX_RECORD_BYTES,
    DoorbellReader,
    DoorbellWriter,
    doorbell,
    read_doorbell,
)
from tandem.shared.handoff.carriers.memfd import MemfdError
from tandem.shared.handoff.carriers.shared_memory.ring import SharedRing

NUMBER = 2**63 + 5

Ends = tuple[DoorbellWriter, DoorbellReader]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine = DoorbellWriter(NUMBER)
    theirs = DoorbellReader(os.getpid(), mine.descriptor, NUMBER)
    mine.opened()
    yield mine, theirs
    theirs.close()
    mine.close()


def _readable(end: DoorbellWriter | DoorbellReader) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def test_records_come_in_order_and_whole(ends: Ends) -> None:
    mine, theirs = ends
    assert not _readable(theirs) and theirs.next() is None
    records = [doorbell(0, 2**32 - 1), b"", b"small frame", b"x" * (MAX_RECORD_BYTES - 2)]
    for record in records:
        mine.ring(record)
    assert _readable(theirs)
    assert [theirs.next() for _ in records] == records
    assert theirs.next() is None


def test_records_that_are_read_now_and_then(ends: Ends) -> None:
    mine, theirs = ends
    records = []
    for number in range(100):
        mine.ring(number.to_bytes(2, "little") * 700)
        if number % 20 == 19:
            while (record := theirs.next()) is not None:
                records.append(record)
    while (record := theirs.next()) is not None:
        records.append(record)
    assert [int.from_bytes(record[:2], "little") for record in records] == list(range(100))


def test_frames_given_back_are_counted_once(ends: Ends) -> None:
    mine, theirs = ends
    assert mine.count_returns() == 0
    theirs.give_back()
    theirs.give_back()
    assert _readable(mine)
    assert mine.count_returns() == 2
    assert mine.count_returns() == 0 and not _readable(mine)


def test_a_reader_that_stops_reading_is_an_error_and_no_wait(ends: Ends) -> None:
    mine, _ = ends
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            mine.ring(b"x" * 4000)


def test_each_side_sees_the_other_one_go() -> None:
    mine = DoorbellWriter(NUMBER)
    theirs = DoorbellReader(os.getpid(), mine.descriptor, NUMBER)
    mine.opened()
    mine.ring(b"last")
    mine.close()
    assert theirs.next() == b"last"
    with pytest.raises(MemfdError, match="has ended"):
        theirs.next()
    theirs.give_back()  # without a reader
    theirs.close()

    mine = DoorbellWriter(NUMBER)
    theirs = DoorbellReader(os.getpid(), mine.descriptor, NUMBER)
    mine.opened()
    theirs.give_back()
    theirs.close()
    assert mine.count_returns() == 1
    with pytest.raises(EOFError):
        mine.count_returns()
    with pytest.raises(BrokenPipeError):
        mine.ring(b"")
    mine.close()


def test_only_the_doorbell_that_was_meant_is_opened() -> None:
    mine, pid = DoorbellWriter(NUMBER), os.getpid()
    with pytest.raises(MemfdError, match="not for the doorbells of connection"):
        DoorbellReader(pid, mine.descriptor, NUMBER - 1)
    with pytest.raises(MemfdError, match="cannot open"):
        DoorbellReader(2**31 - 1, 0, NUMBER)
    with socket.socket() as other, pytest.raises(MemfdError, match="is not a tandem-doorbells"):
        DoorbellReader(pid, other.fileno(), NUMBER)
    ring = SharedRing(4096)
    with pytest.raises(MemfdError, match="is not a tandem-doorbells"):
        DoorbellReader(pid, ring.place.descriptor, NUMBER)
    ring.close()
    mine.close()
    with pytest.raises(MemfdError, match="cannot open"):
        DoorbellReader(pid, 2**20, NUMBER)


def test_a_foreign_pipe_is_neither_read_nor_written() -> None:
    """A peer may name any pipe of this process in its greeting."""
    read, write = os.pipe2(os.O_NONBLOCK)
    mine = DoorbellWriter(NUMBER)
    try:
        os.write(write, b"theirs")
        for descriptor in (read, write):
            with pytest.raises(MemfdError, match="is not a tandem-doorbells"):
                DoorbellReader(os.getpid(), descriptor, NUMBER)
        # Another pipe under the number of one that has gone.
        for end, other in zip(mine._theirs, (read, write), strict=True):
            os.dup2(other, end)
        with pytest.raises(MemfdError, match="not the announced pipe"):
            DoorbellReader(os.getpid(), mine.descriptor, NUMBER)
        assert os.read(read, 99) == b"theirs"
    finally:
        mine.close()
        os.close(read)
        os.close(write)


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        mine = DoorbellWriter(NUMBER)
        with pytest.raises(MemfdError):
            DoorbellReader(os.getpid(), mine.descriptor, 0)
        mine.close()
        mine.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # others may let go of theirs


@pytest.mark.parametrize("record", [b"", doorbell(1, 2)[:-1], b"TDMF" + bytes(12)])
def test_a_record_that_is_no_doorbell_is_a_frame(record: bytes) -> None:
    assert read_doorbell(record) is None
    assert read_doorbell(doorbell(2**64 - 1, 7)) == (2**64 - 1, 7)
