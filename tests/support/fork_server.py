"""Forks routers and nodes from a process that has imported their modules:
``python -m tandem.tests.support.fork_server FD PIPE``.

Tests start a hundred of them, and each would spend two seconds of CPU on imports. The server has
one thread and runs nothing, so that a fork of it is like a process that has just imported.

FD is a Unix socket that listens, and PIPE is closed when the test run ends. Each test process that
connects gets a server of its own, a fork as well. A request, see ``StartRequest``, comes with
descriptors: standard output and error, the pipe on which the part announces that it serves, perhaps
the one that guards its life, and a pipe on which the server reports the process id and, later, the
exit status. When the connection closes, the server kills what still runs.

``tandem serve`` and the launcher of several routers get a fork server of their own for what they
start. A rank is started by the name of its module, with its channel in place of the first pipe.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tandem.shared.process.lifeline import LIFELINE_FD, READY_FD, ROUTER_NUMBER
from tandem.tests.support.forked import (
    MAX_REQUEST_BYTES,
    NUMBER_BYTES,
    RANK,
    ForkedProcess,
    ForkedRank,
    StartRequest,
    request_fork,
)

# Everything that parts import on demand, but for what reads its settings then (huggingface_hub).
MODULES = (
    "encodings.idna",
    "llguidance",
    "safetensors",
    "tandem.router.cluster.admin",
    "tandem.router.doctor.report",
    "tandem.__main__",
    "tandem.shared.engine.executor",
    "tandem.shared.engine.rank.process",
    "tandem.shared.launch.cluster",
    "tandem.router.server",
    "tandem.decode_node.role",
    "tandem.prefill_node.role",
    "tandem.shared.node.process",
    "tandem.shared.launch.routers",
    "tandem.shared.launch.serve",
    "tandem.shared.security.local_token",
    "tandem.shared.telemetry.start_tracer",
    "tandem.shared.engine.rank.loading",
    "tandem.shared.engine.rank.plane",
    "tandem.shared.engine.rank.runner",
    "tandem.shared.engine.structured.llguidance_backend",
    "torch",
)


class ForkServer:
    """Forks a part for each request, and reports how it ended."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._reports: dict[int, int] = {}  # by process id, the pipe for its exit status
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK)

    def serve(self, *, kills: bool = True) -> None:
        """Fork until nobody can ask any more. Then kill what runs, or else wait for its end."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        sources: list[Any] = [self._requests, self._wakes]
        while sources[0] is self._requests or self._reports:
            readable, _, _ = select.select(sources, [], [])
            if self._wakes in readable:
                os.read(self._wakes, 4096)
                self._reap()
            if self._requests in readable:
                data, descriptors, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, 5)
                if data:
                    *of_part, report = descriptors
                    self._fork(StartRequest.decode(data), of_part, report)
                    continue
                sources.remove(self._requests)
                for pid in self._reports if kills else ():
                    os.kill(pid, signal.SIGKILL)

    def _fork(self, request: StartRequest, of_part: list[int], report: int) -> None:
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.detach()
            _be_part(request, *of_part)
        for descriptor in of_part:
            os.close(descriptor)
        self._reports[pid] = report
        os.write(report, pid.to_bytes(NUMBER_BYTES, "big"))

    def _reap(self) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            report = self._reports.pop(pid)
            with open(report, "wb") as pipe:
                pipe.write(code.to_bytes(NUMBER_BYTES, "big", signed=True))


def _be_part(request: StartRequest, output: int, errors: int, *pipes: int) -> NoReturn:
    from tandem.shared.engine import executor
    from tandem.shared.engine.rank import process as rank_process
    from tandem.shared.launch import cluster as launch

    os.dup2(output, 1)
    os.dup2(errors, 2)
    _close_but(*pipes)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    exec(request.prelude, {})
    if request.arguments[0] == RANK:
        os.setsid()
        sys.argv = [rank_process.__name__, str(pipes[0])]
        _end(_status_of(rank_process.main))
    os.environ.update(zip((READY_FD, LIFELINE_FD), map(str, pipes), strict=False))
    if _launches(request) and not request.ranks:
        launch.start_process = _own_server()  # type: ignore[assignment]
    waiting = [_fork_rank() for _ in range(request.ranks)]
    start = executor.start_rank

    async def start_rank(channel: socket.socket) -> asyncio.subprocess.Process | ForkedRank:
        return _become_rank(*waiting.pop(0), channel) if waiting else await start(channel)

    executor.start_rank = start_rank  # type: ignore[assignment]
    # Its command line is the server's.
    Path("/proc/self/comm").write_text(request.arguments[0])
    sys.argv = ["tandem", *request.arguments]
    _end(_status_of(importlib.import_module("tandem.__main__").main))


def _launches(request: StartRequest) -> bool:
    """True if the part starts others."""
    several = any(each.startswith("--router-workers=") for each in request.arguments)
    launches_routers = several and ROUTER_NUMBER not in request.environment
    return request.arguments[0] == "serve" or launches_routers


def _status_of(main: Callable[[], None]) -> int:
    """The exit status of an interpreter that runs this."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End as an interpreter does, without freeing what was imported: that copies all of it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _own_server() -> Callable[..., ForkedProcess]:
    """Fork a server before there are threads; returns what starts processes with it. It ends with
    the last of them, so that what does not end with its launcher is noticed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.setsid()
        _close_but(theirs.fileno())
        ForkServer(theirs).serve(kills=False)
        os._exit(0)
    theirs.close()

    def start(
        arguments: list[str], output: int, pipes: Mapping[str, int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        request = StartRequest(arguments, dict(environment), os.getcwd(), "")
        return request_fork(ours, request, [output, output, pipes[READY_FD], pipes[LIFELINE_FD]])

    return start


def _fork_rank() -> tuple[int, int]:
    """A process id, and a socket: the process becomes a rank when it receives a channel, and ends
    when it will receive none. It is forked before its head has threads."""
    from tandem.shared.engine import executor
    from tandem.shared.engine.rank import process as rank_process

    ours, theirs = (each.detach() for each in socket.socketpair())
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.setsid()
    _close_but(theirs)
    with socket.socket(fileno=theirs) as waits:
        _, channel, _, _ = socket.recv_fds(waits, 1, 1)
    if not channel:
        os._exit(0)
    for name, value in executor.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.argv = [rank_process.__name__, str(channel[0])]
    rank_process.main()
    os._exit(0)


def _become_rank(pid: int, waits: int, channel: socket.socket) -> ForkedRank:
    """Give a process of ``_fork_rank`` its channel."""
    with socket.socket(fileno=waits) as ours:
        socket.send_fds(ours, [b"x"], [channel.fileno()])
    return ForkedRank(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _close_but(*descriptors: int) -> None:
    """Close all descriptors but the standard ones and these."""
    first = 3
    for each in sorted(descriptors):
        os.closerange(first, each)
        first = each + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    listener, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers are not waited for
    imported = False
    sources: list[Any] = [listener, lifeline]
    while lifeline not in select.select(sources, [], [])[0]:
        requests, _ = listener.accept()
        if not imported:
            _import_all()
            imported = True
        with requests:
            if not os.fork():
                listener.close()
                os.close(lifeline)
                ForkServer(requests).serve()
                os._exit(0)
    with suppress(ChildProcessError):
        os.wait()


def _import_all() -> None:
    for name in MODULES:
        importlib.import_module(name)
    # At the end of each part torch would remove all that it has registered, one by one.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (of := finalizer.peek()) and of[1].__module__ == "torch.library":
            finalizer.detach()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # forks would copy what the collector marks


if __name__ == "__main__":
    main()
