"""The images' promises: user 10001, no capability, a read-only root."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import deployment as d
from .place import PLACES, USER, contained, impossible


@pytest.fixture(autouse=True)
def _possible(tmp_path: Path) -> None:
    if reason := impossible(tmp_path):
        pytest.skip(f"no private mount namespace: {reason}")


def run(code: str, root: Path) -> str:
    command = contained([sys.executable, "-c", code], root)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


LOOK = """
import errno, json, os
def writable(folder):
    try:
        with open(os.path.join(folder, "x"), "w"):
            return True
    except OSError as error:
        assert error.errno in (errno.EROFS, errno.EACCES), error
        return False
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "user": os.getuid(),
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "writable": [p for p in ("/", "/tmp", "/cache", "/usr", ROOT) if writable(p)],
}))
"""


def test_the_place_is_as_narrow_as_a_container(tmp_path: Path) -> None:
    report = json.loads(run(f"ROOT = {str(d.ROOT)!r}\n{LOOK}", tmp_path))
    assert report == {"user": USER, "capabilities": 0, "writable": [*PLACES]}


COMPILE = """
import os
from tandem.kernels.cpu import jit
jit.prepare()
from tandem.kernels.cpu.exponential import exp
import numpy as np
assert exp(np.float32(0)) == 1
[kept] = [name for name in os.listdir(exp.stats.cache_path) if name != ".locks"]
print(exp.stats.cache_path)
print(os.path.expanduser("~"))
"""


def test_compiled_kernels_are_kept_in_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    folder, home = run(COMPILE, tmp_path).split()
    assert folder.startswith("/cache/") and home == "/tmp"
