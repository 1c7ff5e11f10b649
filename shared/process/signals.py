"""SIGTERM and SIGINT: the first drains, the second ends the process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

log = logging.getLogger("tandem")


def catch_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` at the first signal; at the second, exit at once with the status that a shell
    reports for a process killed by it.

    Child processes end too: ranks when their head's channel closes, parts of a cluster when their
    launcher's pipe does.
    """
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def catch(number: int) -> None:
        caught.append(number)
        if len(caught) > 1:
            log.warning("second signal: exiting at once, running requests are cut off")
            os._exit(128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, catch, number)
