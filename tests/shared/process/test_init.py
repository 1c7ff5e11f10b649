"""A command that is the first process of a PID namespace, as in a container without an init."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from functools import cache

import pytest

# A command that leaves an orphan behind, has its own child, and ends on a signal.
PROGRAM = """
import os, signal, subprocess, sys, time
from tandem.shared.process.init import run_under_init
run_under_init()
def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.signal(signal.SIGHUP, lambda *_: print("hangup", flush=True))
own = subprocess.Popen(["sh", "-c", "exit 3"])
orphan = subprocess.run(
    ["sh", "-c", "sleep 0.05 >&- & echo $!"], check=True, stdout=subprocess.PIPE
).stdout.decode().strip()
while (state(own.pid), state(orphan)) != ("Z", "gone"):
    time.sleep(0.01)
print("own child:", own.wait(), "first:", os.getpid() == 1, flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(60)
"""


UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@cache
def possible() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode == 0


def start(*arguments: str) -> subprocess.Popen[str]:
    if not possible():
        pytest.skip("this user may not make a PID namespace")
    return subprocess.Popen(
        [*UNSHARE, "--kill-child", sys.executable, "-P", "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )


def first_process(unshare: int) -> int:
    """Process 1 in the namespace created by ``unshare``."""
    with open(f"/proc/{unshare}/task/{unshare}/children") as children:
        return int(children.read())


def test_orphans_are_waited_for_and_exit_statuses_reach_those_who_wait() -> None:
    with start() as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "own child: 3 first: False\n"
            first = first_process(process.pid)
            subprocess.run(["kill", "-HUP", str(first)], check=True)
            assert process.stdout.readline() == "hangup\n"
            subprocess.run(["kill", "-TERM", str(first)], check=True)
            assert process.wait(30) == 7
        finally:
            process.kill()


def test_a_command_that_is_killed_ends_its_container() -> None:
    with start("killed") as process:
        try:
            assert process.wait(30) == 128 + signal.SIGKILL
        finally:
            process.kill()
