"""Signals: the first drains a process, a second SIGTERM or SIGINT ends it at once."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from .queued_stderr import end_stderr

log = logging.getLogger("tandem")

_COUNTED = (signal.SIGTERM, signal.SIGINT)
# Sent by a launcher to drain its parts: a service manager may have sent them SIGTERM already.
DRAIN = signal.SIGUSR1


class Meaning(enum.Enum):
    """The effect of a signal."""

    DRAIN = enum.auto()
    END_AT_ONCE = enum.auto()
    NOTHING = enum.auto()


class CaughtSignals:
    """The signals that a process has received so far.

    SIGHUP, which a closed terminal sends, starts a drain, but has no effect later: a shell and its
    terminal may each send one, and systemd sends it after SIGTERM. If it was ignored from the
    start, as under ``nohup``, it is not caught. The other signals always are: scripts start
    background processes with SIGINT ignored, which would outlive them.
    """

    def __init__(self) -> None:
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self.numbers = (*_COUNTED, DRAIN, *([signal.SIGHUP] if hangs_up else []))
        self._draining = False
        self._counted = 0

    def take(self, number: int) -> Meaning:
        """Count a signal; returns its effect."""
        self._counted += number in _COUNTED
        if self._counted > 1:
            return Meaning.END_AT_ONCE
        draining, self._draining = self._draining, True
        return Meaning.NOTHING if draining else Meaning.DRAIN


def interrupt_on_signals() -> None:
    """Raise ``KeyboardInterrupt`` at the first signal, and again at a second SIGTERM or SIGINT."""
    caught = CaughtSignals()

    def interrupt(number: int, frame: Any) -> None:
        if caught.take(number) is not Meaning.NOTHING:
            raise KeyboardInterrupt

    for number in caught.numbers:
        signal.signal(number, interrupt)


def catch_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at the first signal; at a second SIGTERM or SIGINT, exit at once with the
    status that a shell reports for a process killed by that signal.

    Child processes end too: ranks when their head's channel closes, parts of a cluster when their
    launcher's pipe does.
    """
    loop = asyncio.get_running_loop()
    caught = CaughtSignals()

    def catch(number: int) -> None:
        match caught.take(number):
            case Meaning.DRAIN:
                stop()
            case Meaning.END_AT_ONCE:
                log.warning("second signal: exiting at once, running requests are cut off")
                end_stderr()
                os._exit(128 + number)

    for number in caught.numbers:
        loop.add_signal_handler(number, catch, number)


def describe_exit(status: int) -> str:
    """The end of a child process by its ``subprocess`` exit status: "ended with exit status 1",
    "was killed (SIGSEGV)"."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    # When memory runs out, the kernel kills the largest process, and only its own log says so.
    cause = ", possibly for lack of memory" if -status == signal.SIGKILL else ""
    return f"was killed ({name}){cause}"
