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
import psutil
import pytest

from tandem.tests.end_to_end.support.cluster import until

FULL = Path("/dev/full")


def live_url(process: psutil.Process) -> str | None:
    """The address of the port that answers requests of clients; ``None`` until there is one."""
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            url = f"http://127.0.0.1:{connection.laddr.port}"
            try:
                if httpx.get(f"{url}/live").status_code == 200:
                    return url
            except httpx.HTTPError:
                continue
    return None


@contextmanager
def router(folder: Path, output: int | IO[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router and its address."""
    command = ["router", "--port", "0", "--registry-port", "0", "--log-level", "debug"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem", *command],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=output,
        stderr=output,
    ) as process:
        try:
            router_process = psutil.Process(process.pid)
            until(
                lambda: process.poll() is not None or live_url(router_process) is not None,
                "the router",
            )
            url = live_url(router_process)
            assert url is not None
            yield process, url
        finally:
            process.kill()


def ask(url: str) -> None:
    """A request that logs a line."""
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 503 and response.json()["error"]["message"]


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is of Linux")
def test_a_router_serves_with_its_log_on_a_full_disk(tmp_path: Path) -> None:
    with FULL.open("w") as full, router(tmp_path, full) as (process, url):
        for _ in range(50):
            ask(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_router_serves_and_ends_although_nobody_reads_its_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb") as log:
        try:
            with router(tmp_path, writer) as (process, url):
                for _ in range(100):  # several times what the pipe holds
                    ask(url)
                assert "tandem_log_lines_dropped_total 0.0" in httpx.get(f"{url}/metrics").text
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
        finally:
            os.close(writer)
        assert b"listening on" in log.read()
