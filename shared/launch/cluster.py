"""The processes of a cluster on one machine: started, kept serving, and ended by one launcher.

Each part is a process (``python -m tandem router ...``) that holds the read end of a pipe; when the
launcher dies, for whatever reason, the pipe closes and every part ends.

During the start, the exit of a part is an error. Later, the exit of a node does not affect the
others: after status 0 it has drained and stays away, after any other status it is restarted. The
same is true of one of several routers; the exit of a single router ends the cluster."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StartupError, UsageError
from ..process.backoff import Backoff
from ..process.lifeline import LIFELINE_FD, READY_FD, read_announcements
from ..process.signals import DRAIN, describe_exit
from .part_log import PartLog

# Time limit of a part's end beyond its --drain-timeout.
STOP_SECONDS = 10.0
POLL_SECONDS = 0.2
# Exit status of the command line for an invalid option.
USAGE_STATUS = 2
# A part that dies is restarted after a pause, at most MAX_RESTARTS times in a row; serving for
# GOOD_SECONDS resets the count.
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
MAX_RESTARTS = 5
GOOD_SECONDS = 60.0
# Time without any decode node before the cluster ends: one started elsewhere may still join.
UNSERVED_SECONDS = 5.0
ROUTER, DECODE_NODE = "router", "decode-node"
STDERR = 2
# Prefix of the last line of a failed command, which has the reason.
ERROR_PREFIX = "tandem: "


@dataclass(slots=True)
class ProcessSpec:
    """A process of the cluster, its log, and the pipe of its announcements. Without a log it writes
    to the launcher's standard error."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    log: PartLog | None
    process: subprocess.Popen[bytes]
    ready: int
    announcements: bytes = field(default=b"", repr=False)


class Restarts:
    """The restart policy of one part."""

    def __init__(self) -> None:
        self._count = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)

    def pause(self, served: float) -> float | None:
        """Seconds to wait before the restart of a part that died after serving for ``served``
        seconds; ``None`` if it has died too often."""
        if served >= GOOD_SECONDS:
            self._count = 0
            self._backoff.reset()
        if self._count >= MAX_RESTARTS:
            return None
        self._count += 1
        return self._backoff.pause()

    def outlook(self, pause: float | None) -> str:
        """What happens next, for the operator's log."""
        if pause is None:
            return f"it died {MAX_RESTARTS + 1} times in a row; giving up"
        return f"it is restarted in {pause:.1f} s (restart {self._count} of {MAX_RESTARTS})"


class _Watched:
    """A part of a serving cluster, and the time of its next start."""

    def __init__(self, part: ProcessSpec, now: float) -> None:
        self.part = part
        self.serving_since: float | None = now
        self.started_at = now
        self.restart_at: float | None = None
        self.gone = False
        self._restarts = Restarts()

    def died(self, now: float) -> str:
        """Schedule the restart; returns what happens next, for the operator's log."""
        since, self.serving_since = self.serving_since, None
        pause = self._restarts.pause(0.0 if since is None else now - since)
        self.gone = pause is None
        self.restart_at = None if pause is None else now + pause
        return self._restarts.outlook(pause)


class LocalCluster:
    """The processes of one launcher, and their common environment."""

    def __init__(
        self,
        log_dir: Path | None,
        environment: Mapping[str, str],
        drain_seconds: float = 0.0,
        *,
        start_seconds: float = 600.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Without ``log_dir``, parts write to the launcher's standard error. ``drain_seconds`` is
        the time limit of running requests at the end, ``start_seconds`` that of a restarted part to
        become ready. ``tell`` is called with a line whenever a part starts or ends."""
        self._start_seconds = start_seconds
        self._tell = tell
        self._log_dir = log_dir
        self._environment = environment
        self._stop_seconds = drain_seconds + STOP_SECONDS
        self._parts: list[ProcessSpec] = []
        self._lifeline_read, self._lifeline_write = os.pipe()

    def start(self, name: str, arguments: list[str], **environment: str) -> ProcessSpec:
        """Start ``tandem ARGUMENTS`` with its output in ``NAME.log``, if there is a log folder.

        ``environment`` is added to the common one; it has the secrets, which other users could read
        in the arguments.
        """
        log = None if self._log_dir is None else PartLog(self._log_dir / f"{name}.log")
        process, ready = self._launch(log, arguments, environment)
        part = ProcessSpec(name, arguments, environment, log, process, ready)
        self._parts.append(part)
        return part

    def _launch(
        self, log: PartLog | None, arguments: list[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], int]:
        try:
            output = log.open() if log is not None else os.fdopen(os.dup(STDERR), "wb")
        except OSError as error:
            raise StartupError(
                f"cannot write logs to {self._log_dir}: {error.strerror}; see --log-dir"
            ) from None
        ready_read, ready_write = os.pipe()
        with output:
            process = start_process(
                arguments,
                output.fileno(),
                {READY_FD: ready_write, LIFELINE_FD: self._lifeline_read},
                {**self._environment, **environment},
            )
        os.close(ready_write)
        return process, ready_read

    def wait_starting(self, part: ProcessSpec, deadline: float) -> dict[str, Any]:
        """The part's announcements before it serves. Raises like ``wait_ready``."""
        while not (starting := read_announcements(part.announcements)[0]):
            self._read_announcement(part, deadline)
        return starting

    def wait_ready(self, part: ProcessSpec, deadline: float) -> dict[str, Any]:
        """The part's announcement that it serves. Raises ``StartupError`` with the last log line of
        any part that died, or when ``deadline`` (monotonic) has passed."""
        while not (ready := read_announcements(part.announcements)[1]):
            self._read_announcement(part, deadline)
        return ready

    def _read_announcement(self, part: ProcessSpec, deadline: float) -> None:
        """Wait for more output of a part's pipe."""
        while not select.select([part.ready], [], [], POLL_SECONDS)[0]:
            self.check()
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{part.name} is not ready in time; see --start-timeout and {_log_of(part)}"
                )
        if chunk := os.read(part.ready, 65536):
            part.announcements += chunk
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.process.wait(5)
        self.check()
        raise StartupError(
            f"{part.name} closed its pipe without an announcement; see {_log_of(part)}"
        )

    def check(self) -> None:
        """Raise if a part has exited: ``UsageError`` for an invalid option, else
        ``StartupError``."""
        for part in self._parts:
            status = part.process.poll()
            if status is not None:
                kind = UsageError if status == USAGE_STATUS else StartupError
                raise kind(_death_notice(part, status))

    def keep(
        self,
        routers: Sequence[ProcessSpec],
        serves: Callable[[], bool],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Restart parts that die, until ``is_over()`` or no decode node is left, neither in this
        cluster nor, by ``serves()``, one that joined a router from elsewhere.

        Raises ``StartupError`` if a single router dies, or if all of several routers or the last
        decode node died too often. Returns if the last decode node has drained, or a router was
        shut down.
        """
        now = time.monotonic()
        several = [_Watched(part, now) for part in routers] if len(routers) > 1 else []
        nodes = [_Watched(part, now) for part in self._parts if part not in routers]
        decode = [node for node in nodes if node.part.arguments[0] == DECODE_NODE]
        unserved_since: float | None = None
        while not is_over():
            for router in routers:
                status = router.process.poll()
                if status == 0:
                    self._tell(f"the {router.name} has been shut down")
                    return
                if status is not None and not several:
                    raise StartupError(_death_notice(router, status))
            now = time.monotonic()
            for part in self._parts:
                if part.log is not None:
                    part.log.shorten()
            for watched in (*several, *nodes):
                self._check_part(watched, now)
            if several and all(router.gone for router in several):
                raise StartupError("no router is left: the last one died too often")
            if not all(node.gone for node in decode) or serves():
                unserved_since = None
            elif unserved_since is None:
                unserved_since = now
            elif now - unserved_since >= UNSERVED_SECONDS:
                if any(node.part.process.returncode for node in decode):
                    raise StartupError("no decode node is left: the last one kept dying")
                self._tell("no decode node is left: the last one has drained")
                return
            time.sleep(POLL_SECONDS)

    def _check_part(self, watched: _Watched, now: float) -> None:
        """Note a part's exit, and restart it after its pause."""
        part = watched.part
        if watched.gone:
            return
        if watched.restart_at is not None:
            if now >= watched.restart_at:
                self._restart(watched, now)
            return
        status = part.process.poll()
        if status is None:
            if watched.serving_since is None:
                self._check_start(watched, now)
        elif status == 0:
            watched.gone = True
            self._tell(f"{part.name} has drained and left; the other nodes keep serving")
        else:
            self._tell(f"{_death_notice(part, status)}; {watched.died(now)}")

    def _restart(self, watched: _Watched, now: float) -> None:
        part = watched.part
        watched.restart_at, watched.started_at = None, now
        try:
            process, ready = self._launch(part.log, part.arguments, part.environment)
        except (StartupError, OSError) as error:
            self._tell(f"{part.name} cannot be started: {error}; {watched.died(now)}")
            return
        os.close(part.ready)
        part.process, part.ready, part.announcements = process, ready, b""

    def _check_start(self, watched: _Watched, now: float) -> None:
        part = watched.part
        if select.select([part.ready], [], [], 0)[0]:
            part.announcements += os.read(part.ready, 65536)  # empty if it has just died
            if read_announcements(part.announcements)[1]:
                watched.serving_since = now
                self._tell(f"{part.name} serves again")
        elif now - watched.started_at > self._start_seconds:
            part.process.kill()  # counted as a death at the next check

    def stop(self, tell: Callable[[], None] | None = None) -> None:
        """Call ``tell``, then end every part in the order of their start: first all routers drain
        together, while nodes still serve.

        ``KeyboardInterrupt`` kills the remaining parts.
        """
        try:
            if tell is not None:
                tell()
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
            if part.arguments[0] == ROUTER:
                _drain(part)
        for part in self._parts:
            if part.arguments[0] != ROUTER:
                _drain(part)
            try:
                part.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()
            os.close(part.ready)
        self._parts = []


def start_process(
    arguments: list[str], output: int, pipes: Mapping[str, int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start ``tandem ARGUMENTS``. ``pipes`` maps environment variables to the inherited descriptors
    whose numbers they pass."""
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=tuple(pipes.values()),
        env={
            **environment,
            **{name: str(number) for name, number in pipes.items()},
            "PYTHONSAFEPATH": "1",
        },
        # Ctrl-C must only reach the launcher, which ends the parts in order.
        start_new_session=True,
    )


def _drain(part: ProcessSpec) -> None:
    with contextlib.suppress(ProcessLookupError):
        part.process.send_signal(DRAIN)


def _log_of(part: ProcessSpec) -> str:
    return "its lines above" if part.log is None else f"its log {part.log.path}"


def _death_notice(part: ProcessSpec, status: int) -> str:
    """The end of a part, with the cause if its last log line is the command's own error."""
    end = f"{part.name} {describe_exit(status)}"
    if status < 0 or part.log is None:
        return f"{end}; see {_log_of(part)}"
    line = part.log.last_line()
    if line.startswith(ERROR_PREFIX):
        cause = f": {line.removeprefix(ERROR_PREFIX)}"
    else:
        cause = f"; its log ends with: {line}" if line else "; its log is empty"
    return f"{end}{cause} (log: {part.log.path})"
