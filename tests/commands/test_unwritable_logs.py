"""A process whose log cannot be written, or is not read, continues to serve."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from tandem.shared.process.lifeline import READY_FD, read_announcements

FULL = Path("/dev/full")


@contextmanager
def router(
    folder: Path, output: int | IO[str]
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A router, and a client of it. It is an interpreter, which flushes its streams at its end."""
    ready, write = os.pipe()
    command = ["router", "--port", "0", "--registry-port", "0", "--log-level", "debug"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem", *command],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", READY_FD: str(write)},
        stdout=output,
        stderr=output,
        pass_fds=[write],
    ) as process:
        try:
            os.close(write)
            with os.fdopen(ready, "rb") as pipe:
                _, ports = read_announcements(pipe.read())
            with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}") as client:
                yield process, client
        finally:
            process.kill()


def ask(client: httpx.Client) -> None:
    """A request that logs a line."""
    response = client.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503 and response.json()["error"]["message"]


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is of Linux")
def test_a_router_serves_with_its_log_on_a_full_disk(tmp_path: Path) -> None:
    with FULL.open("w") as full, router(tmp_path, full) as (process, client):
        for _ in range(50):
            ask(client)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_router_serves_and_ends_without_a_reader_of_its_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb") as log:
        try:
            with router(tmp_path, writer) as (process, client):
                for _ in range(100):  # several times what the pipe holds
                    ask(client)
                assert "tandem_log_lines_dropped_total 0.0" in client.get("/metrics").text
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
        finally:
            os.close(writer)
        assert b"listening on" in log.read()
