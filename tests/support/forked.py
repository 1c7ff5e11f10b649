"""Processes that the fork server starts, for tests that would start them as ``tandem ...``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

MAX_REQUEST_BYTES = 1 << 17
RANK = "tandem.shared.engine.rank.process"
# Of a process id or an exit status.
NUMBER_BYTES = 4
_NODES = ("prefill-node", "decode-node", "--pd-server")
# Where the server is, and which code it has imported.
_SERVER = "FORK_SERVER_OF_TESTS"
_CODE = str(Path(__file__).resolve().parent)
_RANKS = re.compile(r"--(?:tp|tensor-parallel-size)=(\d+)")
_HOSTS = re.compile(r"--nnodes=(\d+)")


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A process to start: ``tandem ARGUMENTS`` in a folder, with an environment. ``prelude`` is
    Python that it runs first; what that changes is changed in its ranks as well."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    prelude: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> StartRequest:
        return cls(**json.loads(data))

    @property
    def ranks(self) -> int:
        """The number of ranks that the part will start, at first."""
        if not any(argument in _NODES for argument in self.arguments):
            return 0
        return self._number(_RANKS) // self._number(_HOSTS)

    def _number(self, flag: re.Pattern[str]) -> int:
        """The value of a flag's last use, or 1."""
        values = [int(match[1]) for each in self.arguments if (match := flag.fullmatch(each))]
        return values[-1] if values else 1


class ForkedProcess:
    """A child of the fork server, with what tests use of ``subprocess.Popen``."""

    def __init__(self, report: int) -> None:
        self._report = report
        self.pid = self._read(signed=False)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended, and not reported yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = self._read(signed=True)
            os.close(self._report)
        return self.returncode

    def _read(self, *, signed: bool) -> int:
        data = os.read(self._report, NUMBER_BYTES)
        assert data, "the fork server has ended"
        return int.from_bytes(data, "big", signed=signed)


def request_fork(
    server: socket.socket, request: StartRequest, descriptors: list[int]
) -> ForkedProcess:
    """Have a fork server start a process with these descriptors."""
    report, theirs = os.pipe()
    socket.send_fds(server, [request.encode()], [*descriptors, theirs])
    os.close(theirs)
    return ForkedProcess(report)


class ForkServerProcess:
    """The fork server of a test run, whose workers find it in their environment. It imports what
    parts need when the first one connects, and ends with this process."""

    def __init__(self, address: str) -> None:
        read_end, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(64)
            pipes = listener.fileno(), read_end
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.tests.support.fork_server", *map(str, pipes)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=pipes,
                # OpenBLAS starts its threads when numpy is imported, and gRPC reads then what it
                # may log: ``tandem`` says it before.
                env=os.environ
                | {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
            )
        os.close(read_end)
        os.environ[_SERVER] = f"{_CODE}:{address}"

    @staticmethod
    def is_running() -> bool:
        """True if the process that started this one has a server of the same code."""
        return os.environ.get(_SERVER, "").startswith(f"{_CODE}:")

    def close(self) -> None:
        os.environ.pop(_SERVER, None)
        os.close(self._lifeline)
        try:
            self._process.wait(10)
        finally:
            self._process.kill()


class Forker:
    """This process's connection to the fork server. What it started ends with it."""

    def __init__(self) -> None:
        self._settings = _interpreter_settings(os.environ)
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.connect(os.environ[_SERVER].removeprefix(f"{_CODE}:"))

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """False if the interpreter itself would run differently in this environment."""
        return _interpreter_settings(environment) == self._settings

    def start(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        output: int,
        errors: int,
        ready: int,
        prelude: str = "",
        folder: str = "",
    ) -> ForkedProcess:
        """Start ``tandem ARGUMENTS``, which announces itself on the descriptor ``ready``, in
        ``folder`` (default: this process's)."""
        assert self.can_fork(environment)
        request = StartRequest(arguments, dict(environment), folder or os.getcwd(), prelude)
        return request_fork(self._requests, request, [output, errors, ready])

    def close(self) -> None:
        with self._requests:
            self._requests.shutdown(socket.SHUT_WR)
            self._requests.settimeout(10)
            self._requests.recv(1)  # the server closes it when all parts have ended


@cache
def session_forker() -> Forker:
    """The one connection of this test process."""
    return Forker()


def end_session_forker() -> None:
    """Close it, if there is one."""
    if session_forker.cache_info().currsize:
        session_forker().close()
        session_forker.cache_clear()


class ForkedRank:
    """A forked rank, with what its head uses of ``asyncio.subprocess.Process``; ``wait`` returns
    its exit status, and blocks until there is one."""

    def __init__(self, pid: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self._wait = wait
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._reap, name=f"rank-{self.pid}", daemon=True).start()

    def _reap(self) -> None:
        code = self._wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(self._status.set_result, code)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if not self._status.done():
            os.kill(self.pid, signal.SIGKILL)


async def fork_rank(channel: socket.socket, prelude: str = "") -> ForkedRank:
    """In place of the executor's ``start_rank``; the rank runs ``prelude`` first."""
    from tandem.shared.engine.executor import ENVIRONMENT

    environment = ENVIRONMENT | os.environ
    process = session_forker().start([RANK], environment, 1, 2, channel.fileno(), prelude)
    return ForkedRank(process.pid, process.wait)


def _interpreter_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith("PYTHON")}
