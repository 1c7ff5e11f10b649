"""What a rank refuses to be set up with."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.cpu import jit
from tandem.shared.engine import rank_setup
from tandem.shared.errors import StartupError


def test_compiled_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(StartupError, match=r"--cpu-kernels compiled is for CPUs, .* cuda:1"):
        rank_setup._operators("compiled", torch.device("cuda", 1), torch.bfloat16)


def test_compiled_kernels_without_numba_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise jit.Unavailable("numba is missing")

    monkeypatch.setattr(jit, "prepare", missing)
    with pytest.raises(StartupError, match=r"numba is missing.*tandem-llm\[cpu\].*torch$"):
        rank_setup._operators("compiled", torch.device("cpu"), torch.bfloat16)
