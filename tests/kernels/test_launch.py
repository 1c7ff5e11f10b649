"""Launches without Triton's look-up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tandem.kernels.gpu.launch import cdiv, next_power_of_2
from tandem.tests.kernels.triton_process import printed_lines

OLD = Path(sys.prefix) / "triton36"
VERSIONS = [
    pytest.param(None, id="newest"),
    pytest.param(OLD, id="oldest", marks=pytest.mark.skipif(not OLD.is_dir(), reason="no 3.6")),
]


@pytest.mark.parametrize("triton", VERSIONS)
def test_a_direct_launch_is_of_the_kernel_that_triton_finds(triton: Path | None) -> None:
    (line,) = printed_lines("direct_launches", triton=triton)
    # Of arguments that are aligned and short: all that are launched again, or differ only where
    # Triton does not care.
    assert line.startswith("1600 launches, 480 past Triton")


def test_sizes_of_grids_and_blocks() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5, 989)] == [0, 1, 1, 2, 248]
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65, 989)] == [1, 1, 2, 4, 64, 128, 1024]
