"""One worker as its keeper sees it: the process, and the link to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...shared.errors import StartupError
from ...shared.process.backoff import Backoff
from ...shared.process.ending import ending
from ...shared.process.lifeline import LIFELINE_FD, READY_FD, WORKER
from ...shared.telemetry.logs import logger
from .process_link import Link

log = logger("router")

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
MAX_RESTARTS = 8
# A worker that has served for so long has started well.
GOOD_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What a worker inherits from its keeper. ``started`` is the router's start, by Unix time."""

    number: int
    link: socket.socket
    listener: socket.socket
    started: float
    folder: Path  # of the sockets by which workers reach each other

    @classmethod
    def inherited(cls) -> WorkerPlace | None:
        """The place of this process; ``None`` if it is no worker."""
        text = os.environ.pop(WORKER, None)
        if text is None:
            return None
        number, link, listener, started, folder = text.split(":", 4)
        place = cls(
            int(number),
            socket.socket(fileno=int(link)),
            socket.socket(fileno=int(listener)),
            float(started),
            Path(folder),
        )
        for each in (place.link, place.listener):
            each.setblocking(False)
        return place


class WorkerProcess:
    """A worker, started again whenever it ends."""

    def __init__(
        self,
        number: int,
        listener: socket.socket,
        started: float,
        folder: Path,
        make_link: Callable[[WorkerProcess], Link],
        on_change: Callable[[WorkerProcess], None],
        command: list[str],
    ) -> None:
        self.number = number
        self.link: Link | None = None
        self.serving = False
        self.stopping = False
        self._listener = listener
        self._inherited = f"{listener.fileno()}:{started}:{folder}"
        self._make_link = make_link
        self._on_change = on_change
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)

    async def run(self) -> None:
        """Keep the worker running until it is told to stop. Raises ``StartupError`` if it ends too
        often, or before it has served once."""
        loop, served_once = asyncio.get_running_loop(), False
        while True:
            begun = loop.time()
            status = await self._run_once()
            if self.stopping:
                return
            served_once = served_once or self.serving
            self._ended()
            if loop.time() - begun >= GOOD_SECONDS:
                self._restarts = 0
                self._backoff.reset()
            self._restarts += 1
            if not served_once or self._restarts > MAX_RESTARTS:
                raise StartupError(f"worker {self.number} of the router {ending(status)}")
            pause = self._backoff.pause()
            log.error(
                "worker %d %s, and its requests are lost; it is restarted in %.1f s (restart %d "
                "of %d)",
                self.number,
                ending(status),
                pause,
                self._restarts,
                MAX_RESTARTS,
            )
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        """Start the process, and wait for its end; returns its status."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        place = f"{self.number}:{theirs.fileno()}:{self._inherited}"
        environment = {k: v for k, v in os.environ.items() if k not in (READY_FD, LIFELINE_FD)}
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tandem",
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._listener.fileno()],
                env=environment | {WORKER: place, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl-C must reach the keeper alone
            )
        self.link = link = self._make_link(self)
        linked = asyncio.create_task(link.run(ours))
        ended = asyncio.create_task(process.wait())
        try:
            self._on_change(self)
            await asyncio.wait((linked, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self.stopping and not ended.done():
                await self._kill()  # without its link it could only guess
            return await ended
        finally:
            for task in (linked, ended):
                task.cancel()
            await asyncio.gather(linked, ended, return_exceptions=True)
            await self._kill()
            ours.close()
            self.link = None

    def _ended(self) -> None:
        self.serving = False
        self._on_change(self)

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
