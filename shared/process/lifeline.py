"""The pipes between a process and its launcher: one announces readiness, one ends the process with
its launcher.

Announcements are lines of JSON. One sent before the process serves is wrapped in an object whose
only key is ``STARTING``; the last one announces that it serves, and closes the pipe."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

from .queued_stderr import end_stderr

READY_FD = "TANDEM_READY_FD"
LIFELINE_FD = "TANDEM_LIFELINE_FD"
# The number of a router among several on one port.
ROUTER_NUMBER = "TANDEM_ROUTER_NUMBER"
STARTING = "starting"
GRACE_SECONDS = 5.0


def announce_start(details: dict[str, Any]) -> None:
    """Report to the launcher, if there is one, details that others need before this process
    serves."""
    number = os.environ.get(READY_FD)
    if number is not None:
        os.write(int(number), json.dumps({STARTING: details}).encode() + b"\n")


def announce_ready(details: dict[str, Any]) -> None:
    """Report to the launcher, if there is one, that this process serves, with its addresses."""
    number = os.environ.pop(READY_FD, None)
    if number is not None:
        with os.fdopen(int(number), "w") as pipe:
            pipe.write(json.dumps(details) + "\n")


def read_announcements(lines: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The announcements of a process while it starts, and when it serves; both empty at first."""
    starting: dict[str, Any] = {}
    ready: dict[str, Any] = {}
    for line in lines.splitlines(keepends=True):
        if line.endswith(b"\n"):
            details = dict(json.loads(line))
            if STARTING in details:
                starting |= details[STARTING]
            else:
                ready = details
    return starting, ready


def end_with_launcher() -> None:
    """Send SIGTERM to this process when its launcher dies, for whatever reason."""
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return

    def watch() -> None:
        os.read(int(number), 1)  # nothing is ever written, so it returns when the launcher dies
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        end_stderr()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
