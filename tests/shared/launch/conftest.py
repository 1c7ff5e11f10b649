"""Fixtures of the launcher's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.launch.mps import LIMIT


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PID file of an MPS that runs."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(LIMIT, raising=False)
    file = tmp_path / "nvidia-cuda-mps-control.pid"
    file.write_text("7")
    return file
