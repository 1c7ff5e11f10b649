"""The kernel that shows whether Triton can be used: on a GPU if there is one, else as Triton
interprets it. Without Triton it is skipped."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tandem.kernels.gpu.triton_probe import probe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_kernel_writes_its_number() -> None:
    assert probe(DEVICE) == 1
