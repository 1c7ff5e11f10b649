"""The log of a part, which is rotated when it is long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.launch.part_log import END_BYTES, PartLog


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartLog:
    monkeypatch.setattr("tandem.shared.launch.part_log.MAX_BYTES", 10)
    return PartLog(tmp_path / "router.log")


def test_a_long_log_is_set_aside_and_goes_on_at_its_start(log: PartLog) -> None:
    earlier = log.path.with_name("router.log.1")
    with log.open() as output:
        output.write(b"ten bytes\n")
        output.flush()
        log.shorten()
        assert not earlier.exists()
        for word in (b"first", b"second"):
            output.write(word + b" more\n")
            output.flush()
            log.shorten()
        output.write(b"third\n")
    assert log.path.read_text() == "third\n"
    assert earlier.read_text() == "second more\n"


def test_a_part_that_is_started_again_goes_on(log: PartLog) -> None:
    for line in (b"1\n", b"2\n"):
        with log.open() as output:
            output.write(line)
    assert log.path.read_text() == "1\n2\n"


def test_a_log_that_cannot_be_set_aside_stays_whole(log: PartLog) -> None:
    with log.open() as output:
        output.write(b"more than ten bytes\n")
    log.path.with_name("router.log.1").mkdir()
    log.shorten()
    assert log.path.read_text() == "more than ten bytes\n"


def test_the_last_line_of_a_long_log(log: PartLog) -> None:
    assert log.last_line() == ""
    with log.open() as output:
        output.write(b"x" * 2 * END_BYTES + b"\ntandem: no memory; buy some\n")
    assert log.last_line() == "tandem: no memory; buy some"
