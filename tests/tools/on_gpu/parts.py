"""Parts of a run on a GPU that stand in for the real ones; for the tests of ``on_gpu``."""

from __future__ import annotations

from dataclasses import replace

from tandem.tools.on_gpu.__main__ import EMULATED_TIMES, GpuPart, main

__all__ = ["BAD", "GOOD", "LONG", "PART", "main", "replace"]

# What these do is in the module that they run.
PART = "tandem.tests.tools.on_gpu.on_gpu_part"
GOOD = GpuPart("good", PART, ("passes",), ("torch",), 60)
BAD = GpuPart("bad", PART, ("fails",), (), 60)
LONG = GpuPart("long", PART, ("hangs",), (), 5 / EMULATED_TIMES)
