"""Starts a whole cluster on one machine, waits until it serves, keeps it serving, and ends it.

Each part is a process of its own (``python -m tandem router ...``) that holds the read end of a
pipe; when the launcher ends, however it ends, the pipe closes and every part ends too.

Until all serve, a part that ends is an error. After that a node that ends by itself does not touch
the others: with status 0 it has drained and is not missed, with any other it is started again.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StartupError, UsageError
from ..process.backoff import Backoff
from ..process.lifeline import LIFELINE_FD, READY_FD

# What parts may take to end beyond their --drain-timeout.
STOP_SECONDS = 10.0
POLL_SECONDS = 0.2
# What the command line exits with when an option is wrong.
USAGE_STATUS = 2
# A node that dies is started again after a pause, at most MAX_RESTARTS times in a row; one that has
# served for GOOD_SECONDS begins to count anew.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
MAX_RESTARTS = 5
GOOD_SECONDS = 60.0
# Without a decode node of ours, another one may have joined or be about to.
UNSERVED_SECONDS = 5.0
DECODE_NODE = "decode-node"


@dataclass(slots=True)
class ProcessSpec:
    """One started process, its log, and the pipe on which it says that it is ready."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes]
    ready: int


class Restarts:
    """How often one node has died, and whether it is started again."""

    def __init__(self) -> None:
        self._count = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)

    def pause(self, served: float) -> float | None:
        """Seconds before the next start of a node that died after it had ``served`` for so many;
        ``None`` when it has died too often."""
        if served >= GOOD_SECONDS:
            self._count = 0
            self._backoff.reset()
        if self._count >= MAX_RESTARTS:
            return None
        self._count += 1
        return self._backoff.pause()

    def outlook(self, pause: float | None) -> str:
        """What an operator is told of this pause."""
        if pause is None:
            return "it died too often and is given up"
        return f"it is started again in {pause:.1f} s (restart {self._count} of {MAX_RESTARTS})"


class _Watched:
    """A node while the cluster serves, and when it is to be started again."""

    def __init__(self, part: ProcessSpec, now: float) -> None:
        self.part = part
        self.serving_since: float | None = now
        self.begun = now
        self.restart_at: float | None = None
        self.gone = False
        self._restarts = Restarts()

    def died(self, now: float) -> str:
        """Returns what becomes of it, for the operator."""
        since, self.serving_since = self.serving_since, None
        pause = self._restarts.pause(0.0 if since is None else now - since)
        self.gone = pause is None
        self.restart_at = None if pause is None else now + pause
        return self._restarts.outlook(pause)


class Cluster:
    """The processes that one launcher owns, and the environment that they share."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        drain_seconds: float = 0.0,
        *,
        start_seconds: float = 600.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``drain_seconds``: how long a part that is told to end may go on with its requests;
        ``start_seconds``: how long one that is started again may take to be ready; ``tell`` is
        given a line whenever a node comes or goes."""
        self._start_seconds = start_seconds
        self._tell = tell
        self._log_dir = log_dir
        self._environment = environment
        self._stop_seconds = drain_seconds + STOP_SECONDS
        self._parts: list[ProcessSpec] = []
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, name: str, arguments: list[str], **environment: str) -> ProcessSpec:
        """Start ``tandem ARGUMENTS`` with its output in ``NAME.log``.

        Further ``environment`` is for what other users must not see among its arguments.
        """
        log = self._log_dir / f"{name}.log"
        process, ready = self._launch(log, "wb", arguments, environment)
        part = ProcessSpec(name, arguments, environment, log, process, ready)
        self._parts.append(part)
        return part

    def _launch(
        self, path: Path, mode: str, arguments: list[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], int]:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log = open(path, mode)  # noqa: SIM115
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
        return process, ready_read

    def wait_ready(self, part: ProcessSpec, deadline: float) -> dict[str, Any]:
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
                raise kind(_death_notice(part, status))

    def keep(self, router: ProcessSpec, serves: Callable[[], bool]) -> None:
        """Until a signal, or until nothing is left that could serve: no decode node of ours, and
        ``serves`` says that the router has no other.

        A node that dies is started again. Raises ``StartupError`` when the router ends, or the last
        decode node is given up; returns when the last one has drained.
        """
        now = time.monotonic()
        nodes = [_Watched(part, now) for part in self._parts if part is not router]
        unserved_since: float | None = None
        while True:
            status = router.process.poll()
            if status is not None:
                raise StartupError(_death_notice(router, status))
            now = time.monotonic()
            for node in nodes:
                self._look_after(node, now)
            decode = [node for node in nodes if node.part.arguments[0] == DECODE_NODE]
            if not all(node.gone for node in decode) or serves():
                unserved_since = None
            elif unserved_since is None:
                unserved_since = now
            elif now - unserved_since >= UNSERVED_SECONDS:
                if any(node.part.process.returncode for node in decode):
                    raise StartupError("no decode node is left: the last one died too often")
                self._tell("no decode node is left: the last one has drained")
                return
            time.sleep(POLL_SECONDS)

    def _look_after(self, node: _Watched, now: float) -> None:
        """Start a node again that has died, when it is time to."""
        part = node.part
        if node.gone:
            return
        if node.restart_at is not None:
            if now >= node.restart_at:
                self._start_again(node, now)
            return
        status = part.process.poll()
        if status is None:
            if node.serving_since is None:
                self._look_at_start(node, now)
        elif status == 0:
            node.gone = True
            self._tell(f"{part.name} has drained and left; the others go on")
        else:
            self._tell(f"{_death_notice(part, status)}; {node.died(now)}")

    def _start_again(self, node: _Watched, now: float) -> None:
        part = node.part
        node.restart_at, node.begun = None, now
        try:
            process, ready = self._launch(part.log, "ab", part.arguments, part.environment)
        except (StartupError, OSError) as error:
            self._tell(f"{part.name} cannot be started: {error}; {node.died(now)}")
            return
        os.close(part.ready)
        part.process, part.ready = process, ready

    def _look_at_start(self, node: _Watched, now: float) -> None:
        if select.select([node.part.ready], [], [], 0)[0]:
            if os.read(node.part.ready, 65536):  # nothing, when it has just died
                node.serving_since = now
                self._tell(f"{node.part.name} serves again")
        elif now - node.begun > self._start_seconds:
            node.part.process.kill()  # which counts as a death

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


def _death_notice(part: ProcessSpec, status: int) -> str:
    return f"{part.name} ended with exit status {status}: {_log_tail(part.log)} (log: {part.log})"


def _log_tail(log: Path) -> str:
    """The last line of a log: a part that cannot start says why in one line."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("tandem: ") if lines else "it said nothing"
