# mypy: ignore-errors
"""A server with options that the shared one lacks, for the tests that need it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request

STARTING_SECONDS = 120


@contextlib.contextmanager
def started(*options):
    """The URL of a server like the one of TARGET_URL, with these options."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        folders = (f"--log-dir={folder}/logs", f"--batch-dir={folder}/batches", f"--port={port}")
        command = [*json.loads(os.environ["TARGET_COMMAND"]), *folders, *options]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            _await_health(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _await_health(url, process):
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError("the server did not start")
