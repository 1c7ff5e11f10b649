"""SIGTERM, SIGINT and SIGHUP: the first drains, a second SIGTERM or SIGINT ends the process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

log = logging.getLogger("tandem")

# They cannot be ignored: background processes of scripts start with SIGINT ignored.
ENDING = (signal.SIGTERM, signal.SIGINT)


def draining_signals() -> tuple[signal.Signals, ...]:
    """The signals that begin a drain. SIGHUP, which comes when a terminal is closed, is one unless
    it was ignored from the start, as by ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ENDING if ignored else (*ENDING, signal.SIGHUP)


def catch_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at the first signal; at the second, exit at once with the status that a shell
    reports for a process killed by it. SIGHUP does not count: a shell and its terminal may each
    send one, and systemd sends it after SIGTERM.

    Child processes end too: ranks when their head's channel closes, parts of a cluster when their
    launcher's pipe does.
    """
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def catch(number: int) -> None:
        if number in ENDING:
            caught.append(number)
        if len(caught) > 1:
            log.warning("second signal: exiting at once, running requests are cut off")
            os._exit(128 + number)
        stop()

    for number in draining_signals():
        loop.add_signal_handler(number, catch, number)
