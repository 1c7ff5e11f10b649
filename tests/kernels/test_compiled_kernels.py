"""The record of compiled kernels: what its digests depend on, and what is not as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tandem.tests.kernels import compiled_kernels
from tandem.tests.kernels.compiled_kernels import MachineCode, Record, read_record
from tandem.tests.kernels.triton_process import printed_lines

KERNEL = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)


@triton.jit
def _scaled(x):
    return x * SCALE


@triton.jit
def _kernel(x_ptr, BLOCK_N: tl.constexpr):
    columns = tl.arange(0, BLOCK_N)
    tl.store(x_ptr + columns, _scaled(tl.load(x_ptr + columns)))
"""
CODE = MachineCode(4, 96, 0, 0, 1024, 8, 0, 16, 0, 120)


def test_a_digest_depends_on_code_and_constants_but_not_on_lines(tmp_path: Path) -> None:
    variants = {
        "first": KERNEL,
        "moved": "# A comment\n" + KERNEL,
        "constant": KERNEL.replace("2.0", "3.0"),
        "called": KERNEL.replace("x * SCALE", "x + SCALE"),
        "body": KERNEL.replace("tl.store", "tl.atomic_add"),
    }
    files = [tmp_path / f"{name}.py" for name in variants]
    for file, text in zip(files, variants.values(), strict=True):
        file.write_text(text)
    first, moved, *changed = printed_lines("digests_of", *map(str, files))
    assert moved == first
    assert len({first, *changed}) == 1 + len(changed)


def test_what_is_not_as_recorded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels, "FILE", tmp_path / "record.csv")
    monkeypatch.setattr(compiled_kernels, "FULL", False)
    assert read_record([90]).read == {}
    record = Record({})
    for digest in ("1a", "2b", "3c"):
        record.note(digest, 90, f"kernel {digest}", CODE)
    record.note("4d", 80, "kernel 4d", CODE)
    record.write()

    record = read_record([90])
    assert record.read == {"1a": CODE, "2b": CODE, "3c": CODE}
    record.note("1a", 90, "kernel 1a", CODE)
    record.note("2b", 90, "kernel 2b", MachineCode(4, 97, 0, 0, 1024, 8, 0, 16, 0, 120))
    record.note("5e", 90, "kernel 5e", CODE)
    assert record.differences() == [
        "90 kernel 2b: not as recorded",
        "90 kernel 5e: not recorded",
        "recorded as 3c: gone",
    ]
