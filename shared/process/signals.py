"""SIGTERM and SIGINT of a process that drains."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

log = logging.getLogger("tandem")


def catch_signals(stop: Callable[[], None]) -> None:
    """The first signal calls ``stop``; the second ends the process at once, whatever it is doing,
    with the status that a shell gives to a process that died of it.

    What the process started ends with it: ranks follow their head's channel, parts their launcher's
    pipe.
    """
    loop = asyncio.get_running_loop()
    caught: list[int] = []

    def catch(number: int) -> None:
        caught.append(number)
        if len(caught) > 1:
            log.warning("told to end a second time: what still runs is cut off")
            os._exit(128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, catch, number)
