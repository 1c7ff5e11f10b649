"""One signal drains, two end: whatever the process is doing, and whatever it has started."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from tandem.shared.process.signals import catch_signals

async def run():
    told = asyncio.Event()
    catch_signals(told.set)
    print("ready", flush=True)
    await told.wait()
    print("draining", flush=True)
    await asyncio.sleep(60)

asyncio.run(run())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_drain_at_once(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            for word in (b"ready\n", b"draining\n"):
                assert process.stdout.readline() == word
                process.send_signal(number)
            assert process.wait(10) == 128 + number
        finally:
            process.kill()
