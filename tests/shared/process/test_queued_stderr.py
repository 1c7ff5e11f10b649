"""Standard error whose reader is slow, stuck or gone."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.shared.process import queued_stderr
from tandem.shared.process.queued_stderr import QueuedStderr
from tandem.tests.end_to_end.support.cluster import until


class Pipe:
    """A stream, and its reading end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = QueuedStderr(self.writer)

    def read_until(self, words: str) -> str:
        text = ""
        while words not in text:
            text += os.read(self.reader, 65536).decode()
        return text

    def rest(self) -> str:
        """The text until the end of the stream."""
        text: list[str] = []
        with open(self.reader, "rb", closefd=False) as reader:
            reading = threading.Thread(target=lambda: text.append(reader.read().decode()))
            reading.start()
            self.stream.end(30)
            os.close(self.writer)
            self.writer = -1
            reading.join()
        return text[0]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.stream.end(0)
    for each in (pipe.reader, pipe.writer):
        if each >= 0:
            os.close(each)


@pytest.fixture
def handler(pipe: Pipe) -> Iterator[logging.Handler]:
    handler = logging.StreamHandler(pipe.stream)
    queued_stderr.log.addHandler(handler)
    yield handler
    queued_stderr.log.removeHandler(handler)


def test_whoever_prints_does_not_wait_and_lines_keep_their_order(pipe: Pipe) -> None:
    lines = [f"line {number}" for number in range(5_000)]
    for line in lines:  # many times what the pipe holds
        print(line, file=pipe.stream)
    assert pipe.rest().splitlines() == lines
    assert pipe.stream.dropped == 0


def test_pieces_become_lines_and_a_flush_shows_an_unfinished_one(pipe: Pipe) -> None:
    print("a", "b", sep="-", end=" ", file=pipe.stream)
    pipe.stream.write("é\ntwo")
    assert pipe.read_until("é\n") == "a-b é\n"
    pipe.stream.flush()
    assert pipe.read_until("two") == "two"
    assert (pipe.stream.isatty(), pipe.stream.fileno()) == (False, pipe.writer)


@pytest.mark.usefixtures("handler")
def test_lines_beyond_the_queue_are_dropped_counted_and_reported(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued_stderr, "MAX_BYTES", 64 << 10)
    line = "x" * 99
    for number in range(2_000):
        pipe.stream.write(f"{number:4} {line}\n")
    dropped = pipe.stream.dropped
    assert 1_000 < dropped < 1_500
    notice = f"{dropped} lines of this log are missing: they could not be written\n"
    output = pipe.read_until(notice)
    # The notice is at the place of the missing lines.
    pipe.stream.write("more\n")
    numbers = [int(line[:4]) for line in output.removesuffix(notice).splitlines()]
    assert numbers == list(range(2_000 - dropped))
    assert pipe.rest() == "more\n"


@pytest.mark.usefixtures("handler")
def test_a_reader_that_leaves_and_a_full_disk_cost_lines_alone(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, True

    def write_some(file: int, data: memoryview) -> int:
        """Write as much of a line as there is room for."""
        if not full:
            return write(file, data)
        if bytes(data).startswith(b"half a line"):
            return write(file, data[:4])
        raise OSError(28, "no space is left")

    monkeypatch.setattr(queued_stderr.os, "write", write_some)
    for number, lines in ((1, "half a line"), (3, "two\nthree"), (4, "four")):
        print(lines, file=pipe.stream)
        until(lambda number=number: pipe.stream.dropped == number, f"{number} dropped")  # type: ignore[misc]
    full = False
    print("five", file=pipe.stream)
    assert pipe.rest() == (
        "half\nfive\n4 lines of this log are missing: they could not be written\n"
    )


def test_an_end_waits_for_a_slow_reader_but_not_for_a_stuck_one(pipe: Pipe) -> None:
    pipe.stream.write("y" * 99_999 + "\n")
    pipe.stream.end(0.01)
    pipe.stream.write("too late\n")
    pipe.stream.flush()
    assert "too late" not in pipe.read_until("\n")


def test_what_follows_the_end_is_written_at_once(pipe: Pipe) -> None:
    pipe.stream.write("one\n")
    pipe.stream.end(30)
    assert pipe.read_until("\n") == "one\n"
    pipe.stream.write("two\n")
    assert os.read(pipe.reader, 99) == b"two\n"


PROGRAM = """
import os, sys, threading, warnings
from tandem.shared.process.queued_stderr import end_stderr, queue_stderr
queue_stderr()
{}
"""


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("for n in range(999): print(n, file=sys.stderr)\nsys.exit('the end')", "998\nthe end\n"),
        ("print('first', file=sys.stderr)\nraise ValueError('the end')", "ValueError: the end\n"),
        ("print('x', end='', file=sys.stderr)", "x"),
        ("warnings.warn('odd')", "UserWarning: odd\n"),
        ("print(1, file=sys.stderr); end_stderr(); os._exit(0)", "1\n"),
        ("threading.Thread(target=lambda: 1 / 0).start()", "division by zero\n"),
        # A fork has its own thread, and none of the text that its parent has queued.
        (
            "print('parent', file=sys.stderr)\n"
            "if not os.fork(): print('child', file=sys.stderr); end_stderr(); os._exit(0)\n"
            "os.wait(); end_stderr()\n"
            "print('parent again', file=sys.stderr)",
            "parent again\n",
        ),
    ],
)
def test_nothing_is_lost_at_an_end(program: str, ends: str) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM.format(program)]
    text = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60).stderr
    assert text.endswith(ends)
    assert text.count("child") <= 1 and text.count("parent\n") <= 1
    if "fork" in program:
        assert sorted(text.splitlines()) == ["child", "parent", "parent again"]


def test_a_closed_standard_error_is_left_alone() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-P", "-c", PROGRAM.format("")],
        timeout=60,
    )
    assert done.returncode == 0
