"""Threads of kernels on cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In a process of its own, whose threads stay where they are bound.
BIND = """
import os, threading
import torch
torch.set_num_threads(2)
from tandem.kernels.cpu import jit
jit.prepare()
from tandem.kernels.cpu.thread_cores import bind, usable_cores
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
cores = usable_cores()[-2:]
bind(cores[::-1])
assert os.sched_getaffinity(0) == {cores[1]}
assert len(os.sched_getaffinity(other.native_id)) > 1
bound = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
assert sorted(max(each) for each in bound if len(each) == 1) == cores, bound
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores that threads can be bound to",
)
def test_each_thread_of_the_kernels_has_a_core_and_others_have_all() -> None:
    subprocess.run([sys.executable, "-c", BIND], check=True, timeout=120)
