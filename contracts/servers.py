"""The servers under test, one process per suite run."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from .suites import Server

STARTING_SECONDS = 120
REAL_MODEL = "REAL_MODEL"


def command_of(server: Server, key: str, folder: Path) -> list[str]:
    """The command that starts a server, without its port."""
    filled = {"key": key, "folder": folder, "real_model": os.environ.get(REAL_MODEL)}
    return [sys.executable, "-m", *(part.format(**filled) for part in server.arguments)]


@contextlib.contextmanager
def served(server: Server, key: str, folder: Path) -> Iterator[str]:
    """Run a server inside the block and give its URL; its files go to ``folder``."""
    if server.needs_real_model and not os.environ.get(REAL_MODEL):
        raise SystemExit(
            f"set {REAL_MODEL} to a model's folder; docs/testing.md has how to get one"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command_of(server, key, folder), f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _await_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start")
