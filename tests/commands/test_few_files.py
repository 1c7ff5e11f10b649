"""A router with a low limit of open files has few connections, but serves those."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.shared.process.lifeline import read_announcements
from tandem.tests.end_to_end.support.cluster import until
from tandem.tests.support.forked import session_forker

FILES, CLIENTS = 160, 250
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))"
SHORT = 32768  # a line of the log for each client that is served, at most
NO_FILE = "a connection cannot be accepted: Too many open files; raise the limit of open files"
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
)
CLOSED = b"closed a new connection"


@contextmanager
def router(log: Path, *flags: str) -> Iterator[tuple[psutil.Process, dict[str, int]]]:
    """A router that may open that many files, and its ports."""
    read, write = os.pipe()
    command = ["router", "--port=0", "--registry-port=0", "--metrics-port=0", *flags]
    with log.open("wb") as file:
        process = session_forker().start(
            command, os.environ, 1, file.fileno(), write, prelude=LIMITED
        )
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            _, ports = read_announcements(pipe.read())
        assert ports, log.read_text()
        yield psutil.Process(process.pid), ports
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)


def serves(ports: dict[str, int]) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{ports['http']}/live").status_code == 200
    except httpx.TransportError:
        return False


def test_clients_beyond_its_files_cost_a_router_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with router(log, "--header-timeout=60") as (_, ports):
        clients = []
        for _ in range(CLIENTS):
            clients.append(socket.create_connection(("127.0.0.1", ports["http"])))
            clients[-1].sendall(HALF)
        until(lambda: CLOSED in log.read_bytes(), "connections that are closed")
        probes = f"http://127.0.0.1:{ports['metrics']}"
        for _ in range(5):
            assert httpx.get(f"{probes}/health").text == "alive\n"
        page = httpx.get(f"{probes}/metrics").text
        assert f"process_max_fds {FILES}.0" in page
        for each in clients:
            each.close()

        until(lambda: serves(ports), "room for a client")
    text = log.read_text()
    assert len(text) < SHORT
    assert text.count("--max-connections") == 1 and "LimitNOFILE" in text
    assert "Traceback" not in text and "cannot be accepted" not in text
    assert text.count(CLOSED.decode()) <= 2


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="needs prlimit(2)")
def test_a_router_that_can_open_nothing_says_so_once_and_serves_when_it_can(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with router(log) as (process, ports):
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), FILES))
        clients = [socket.create_connection(("127.0.0.1", ports["http"])) for _ in range(40)]
        until(lambda: NO_FILE in log.read_text(), "a line about it")
        process.rlimit(psutil.RLIMIT_NOFILE, (FILES, FILES))
        until(lambda: serves(ports), "connections to be accepted again")
        for each in clients:
            each.close()
    text = log.read_text()
    assert len(text) < SHORT
    assert text.count(NO_FILE) == 1 and "Traceback" not in text
