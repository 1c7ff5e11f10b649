"""Files that are read ahead of the tensors in them."""

from __future__ import annotations

import os
import queue
import sys
import threading
from pathlib import Path

import pytest
import torch

from tandem.shared.errors import ModelError
from tandem.shared.weights import file_reads
from tandem.shared.weights.file_reads import FilePart, FileReads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends files nowhere")


class Sent:
    """The bytes that were read ahead, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self._sent = queue.Queue[tuple[int, int]]()
        self._fails = fails
        self._sendfile = os.sendfile
        monkeypatch.setattr(os, "sendfile", self._note)

    def _note(self, out: int, fd: int, begin: int, count: int) -> int:
        self._sent.put((begin, begin + count))
        if self._fails:
            raise OSError("failing disk")
        return self._sendfile(out, fd, begin, count)

    def next(self) -> tuple[int, int]:
        return self._sent.get(timeout=10)

    @property
    def nothing_more(self) -> bool:
        return self._sent.empty()


@pytest.mark.parametrize("fails", [False, True])
def test_as_much_is_read_ahead_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Errors are left to the reads themselves."""
    monkeypatch.setattr(file_reads, "_AT_ONCE", 100)
    monkeypatch.setattr(file_reads, "_AHEAD", 300)
    path, data = tmp_path / "file", bytes(range(250)) * 4
    path.write_bytes(data)
    sent = Sent(monkeypatch, fails=fails)
    descriptors = len(os.listdir("/dev/fd"))
    with FileReads() as reads:
        reads.ahead([FilePart(path, 0, 1000)])
        expected = [(0, 100), (100, 200), (200, 300)]
        assert [sent.next() for _ in expected[: 1 if fails else 3]] == expected[: 1 if fails else 3]
        for begin, count, more in ((0, 99, []), (99, 101, [(300, 400), (400, 500)])):
            assert sent.nothing_more
            into = torch.zeros(count, dtype=torch.uint8)
            reads.rows(path, begin, into, "numbers")
            assert into.numpy().tobytes() == data[begin : begin + count]
            if not fails:
                assert [sent.next() for _ in more] == more
    assert sent.nothing_more
    assert len(os.listdir("/dev/fd")) == descriptors
    assert not any(each.name == "read-ahead" for each in threading.enumerate())


def test_reading_ahead_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "_AHEAD", 0)
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    sent = Sent(monkeypatch)
    with pytest.raises(ModelError, match="truncated while numbers"), FileReads() as reads:
        reads.ahead([FilePart(path, 0, 1 << 40)])
        reads.rows(path, 0, torch.zeros(1001, dtype=torch.uint8), "numbers")
    assert sent.nothing_more
    assert not any(each.name == "read-ahead" for each in threading.enumerate())


def test_neighbours_are_read_ahead_in_the_order_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As layers are, whose tensors lie in the order of their names."""
    monkeypatch.setattr(file_reads, "_NEAR", 100_000)
    one, two = Path("one"), Path("two")
    table = FilePart(one, 5000, 300_000)
    later = FilePart(one, 700_000, 730_000)
    gap, q, k, up = (
        FilePart(two, begin, begin + 10_000) for begin in (60_000, 20_000, 10_000, 40_100)
    )
    far, last = FilePart(two, 90_000, 200_000), FilePart(one, 0, 5000)
    ordered = file_reads._by_place([table, q, k, up, gap, later, far, last])
    assert ordered == [
        table,
        FilePart(one, 700_000, 730_000),
        FilePart(two, 10_000, 30_000),
        FilePart(two, 40_100, 50_100),
        FilePart(two, 60_000, 70_000),
        last,
        far,
    ]
