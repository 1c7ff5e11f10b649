"""The Triton kernels compiled for GPUs older and newer than that of ``test_compile_ahead.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tandem.tests.kernels.triton_process import check_compiled


def test_kernels_fit_older_and_newer_gpus() -> None:
    check_compiled(80, 89, 100)
