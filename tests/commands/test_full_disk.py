"""A process whose log can no longer be written serves on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is of Linux")
def test_a_router_serves_with_its_log_on_a_full_disk(tmp_path: Path) -> None:
    command = ["router", "--port", "0", "--registry-port", "0", "--log-level", "debug"]
    with FULL.open("w") as full:
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem", *command],
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=full,
            stderr=full,
        )
    with started as process:
        try:
            found = psutil.Process(process.pid)
            until(lambda: process.poll() is not None or live_url(found) is not None, "the router")
            url = live_url(found)
            assert url is not None
            for _ in range(50):  # a line each
                answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"})
                assert answer.status_code == 503 and answer.json()["error"]["message"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
