"""The oldest version of Triton that pyproject.toml allows compiles the kernels as well.

`make` installs it beside the other packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tandem.tests.kernels.triton_process import check_compiled, check_steps
from tandem.tests.support.extent import FULL

TRITON = Path(sys.prefix) / "triton36"
pytestmark = pytest.mark.skipif(not TRITON.is_dir(), reason="make .venv/.triton36")


def test_kernels_fit_gpus_that_are_not_here() -> None:
    """Those whose instructions are counted, and all in the full extent: the other generations get
    what the newest Triton compiles for them."""
    generations = (80, 89, 90, 100) if FULL else (90,)
    assert check_compiled(*generations, triton=TRITON).startswith("Triton 3.6.")


def test_no_step_compiles_a_kernel() -> None:
    """Of a model of each kind, and of all in the full extent."""
    check_steps(*([] if FULL else ["few"]), triton=TRITON)
