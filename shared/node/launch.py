"""Starts a whole cluster on one machine, waits until it serves, and ends it.

Each part is a process of its own (``python -m tandem router ...``) that holds the read end of a
pipe; when the launcher ends, however it ends, the pipe closes and every part ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StartupError, UsageError
from .lifeline import LIFELINE_FD, READY_FD

# What parts may take to end beyond their --drain-timeout.
STOP_SECONDS = 10.0
POLL_SECONDS = 0.2
# What the command line exits with when an option is wrong.
USAGE_STATUS = 2


@dataclass(slots=True)
class Part:
    """One started process, its log, and the pipe on which it says that it is ready."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: int


class Cluster:
    """The processes that one launcher owns, and the environment that they share."""

    def __init__(
        self, log_dir: Path, environment: Mapping[str, str], drain_seconds: float = 0.0
    ) -> None:
        """``drain_seconds``: how long a part that is told to end may go on with its requests."""
        self._log_dir = log_dir
        self._environment = environment
        self._stop_seconds = drain_seconds + STOP_SECONDS
        self._parts: list[Part] = []
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, name: str, arguments: list[str], **environment: str) -> Part:
        """Start ``tandem ARGUMENTS`` with its output in ``NAME.log``.

        Further ``environment`` is for what other users must not see among its arguments.
        """
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log = open(self._log_dir / f"{name}.log", "wb")  # noqa: SIM115
        except OSError as error:
            raise StartupError(
                f"cannot write logs to {self._log_dir}: {error.strerror}; see --log-dir"
            ) from None
        ready_read, ready_write = os.pipe()
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[ready_write, self._lifeline_read],
                env={
                    **self._environment,
                    **environment,
                    READY_FD: str(ready_write),
                    LIFELINE_FD: str(self._lifeline_read),
                    "PYTHONSAFEPATH": "1",
                },
                # Ctrl-C is for the launcher, which ends the parts in order.
                start_new_session=True,
            )
        os.close(ready_write)
        part = Part(name, process, self._log_dir / f"{name}.log", ready_read)
        self._parts.append(part)
        return part

    def wait_ready(self, part: Part, deadline: float) -> dict[str, Any]:
        """What the part announced. Raises ``StartupError`` with the last words of any part that
        died, and when ``deadline`` (monotonic) has passed."""
        while not select.select([part.ready], [], [], POLL_SECONDS)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{part.name} is not ready in time; see --start-timeout and its log {part.log}"
                )
        line = b""
        while chunk := os.read(part.ready, 65536):
            line += chunk
        if line:
            return dict(json.loads(line))
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.process.wait(5)
        self.check()
        raise StartupError(f"{part.name} closed its pipe without a word; see its log {part.log}")

    def check(self) -> None:
        """Raises when a part has ended by itself: ``UsageError`` when an option was wrong."""
        for part in self._parts:
            status = part.process.poll()
            if status is not None:
                kind = UsageError if status == USAGE_STATUS else StartupError
                raise kind(
                    f"{part.name} ended with exit status {status}: {_last_words(part.log)} "
                    f"(log: {part.log})"
                )

    def wait(self) -> None:
        """Until a signal, or until a part ends by itself, which is an error."""
        while True:
            self.check()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End every part, the first started first: the router drains while nodes still serve.

        Whoever does not want to wait for that interrupts it, which cuts off what still runs.
        """
        try:
            self._drain()
        except KeyboardInterrupt:
            for part in self._parts:
                part.process.kill()
            raise
        finally:
            os.close(self._lifeline_write)
            os.close(self._lifeline_read)

    def _drain(self) -> None:
        deadline = time.monotonic() + self._stop_seconds
        for part in self._parts:
            with contextlib.suppress(ProcessLookupError):
                part.process.send_signal(signal.SIGTERM)
            try:
                part.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()
            os.close(part.ready)
        self._parts = []


def _last_words(log: Path) -> str:
    """The last line of a log: a part that cannot start says why in one line."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("tandem: ") if lines else "it said nothing"
