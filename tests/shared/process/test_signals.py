"""One signal drains a process, two end it, whatever it is doing; exit statuses in words."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.shared.process.signals import DRAIN, CaughtSignals, Meaning, describe_exit

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP

PROGRAM = """
import asyncio
from tandem.shared.process.signals import catch_signals

async def run():
    stop = asyncio.Event()
    catch_signals(stop.set)
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(60)

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("numbers", "meanings"),
    [
        ([TERM, TERM], "drain end"),
        ([INT, TERM], "drain end"),
        ([HUP, HUP, HUP], "drain - -"),
        # A closed terminal, then the end of the session.
        ([HUP, TERM, HUP, INT], "drain - - end"),
        ([TERM, HUP], "drain -"),
        # A service manager signals every process, and the launcher does as well.
        ([TERM, DRAIN], "drain -"),
        ([DRAIN, TERM, TERM], "drain - end"),
    ],
)
def test_only_a_second_signal_of_somebody_who_waits_ends_a_drain(
    numbers: list[signal.Signals], meanings: str
) -> None:
    words = {Meaning.DRAIN: "drain", Meaning.NOTHING: "-", Meaning.END_AT_ONCE: "end"}
    caught = CaughtSignals()
    assert [words[caught.take(number)] for number in numbers] == meanings.split()


@contextmanager
def started(*before: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*before, sys.executable, "-P", "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_second_signal_ends_a_drain_at_once(number: signal.Signals) -> None:
    with started() as process:
        assert process.stdout is not None
        process.send_signal(number)
        assert process.stdout.readline() == b"draining\n"
        process.send_signal(number)
        assert process.wait(10) == 128 + number


@pytest.mark.parametrize("drained_by", [HUP, DRAIN])
def test_a_closed_terminal_drains_however_often_it_says_so(drained_by: signal.Signals) -> None:
    with started() as process:
        assert process.stdout is not None
        process.send_signal(drained_by)
        assert process.stdout.readline() == b"draining\n"
        process.send_signal(drained_by)
        process.send_signal(TERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(TERM)
        assert process.wait(10) == 128 + TERM


def test_nohup_keeps_a_process_that_a_terminal_leaves_behind() -> None:
    with started("sh", "-c", "trap '' HUP; exec \"$@\"", "sh") as process:
        assert process.stdout is not None
        process.send_signal(HUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(TERM)
        assert process.stdout.readline() == b"draining\n"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with exit status 0"),
        (143, "ended with exit status 143"),
        (-9, "was killed (SIGKILL), possibly for lack of memory"),
        (-11, "was killed (SIGSEGV)"),
        (-15, "was killed (SIGTERM)"),
        (-63, "was killed (signal 63)"),
    ],
)
def test_a_signal_is_named_and_a_status_is_a_number(status: int, words: str) -> None:
    assert describe_exit(status) == words
