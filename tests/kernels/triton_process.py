"""Runs a module of this folder in a process whose Triton compiles, rather than interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_lines(module: str, *arguments: str, triton: Path | None = None) -> list[str]:
    """The lines that the module prints. ``triton`` is a folder with another version of Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    command = [sys.executable, "-P", "-m", f"tandem.tests.kernels.{module}", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    return process.stdout.splitlines()


def check_compiled(*generations: int, triton: Path | None = None) -> str:
    """Compile all kernels for these generations. Returns the version of Triton."""
    version, *lines = printed_lines("compile_ahead", *map(str, generations), triton=triton)
    assert {line.split()[0] for line in lines} == {str(each) for each in generations}
    with_count = [line for line in lines if "slots a clock" in line]
    assert {line.split()[0] for line in with_count} == {"90"} & {str(each) for each in generations}
    names = {line.split(":")[0] for line in lines}
    for generation in {*generations} - {89}:  # for which few are compiled
        for dtype in ("bfloat16", "fp8", "int8"):
            assert f"{generation}  attend Llama-3-8B bfloat16 {dtype}" in names
        for way in ("out", "in"):
            assert f"{generation}  copy_frame 128 bf16 {way}" in names
    return version


def check_steps(*arguments: str, triton: Path | None = None) -> None:
    """Run steps of whole models, none of which may compile a kernel."""
    lines = printed_lines("step_kernels", *arguments, triton=triton)
    assert len(lines) >= (9 if arguments else 12)
    for line in lines:
        assert line.endswith(" 0 keys first seen in a step") and " 0 launches" not in line, line
