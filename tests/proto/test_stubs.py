"""The committed stubs match the files in proto/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_committed_stubs_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    # In its own process: protoc and NIXL contain the same C++ libraries and cannot share one.
    command = [sys.executable, "-m", "tandem.proto.generate", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for generated in sorted(tmp_path.iterdir()):
        committed = Path(__file__).parents[2] / "proto" / generated.name
        assert generated.read_text() == committed.read_text(), "run python -m tandem.proto.generate"
    assert len(list(tmp_path.iterdir())) == 6
