"""The committed stubs are what proto/tandem.proto gives."""

from __future__ import annotations

from pathlib import Path

import pytest

generate = pytest.importorskip("tandem.proto.generate")


@pytest.mark.parametrize("name", ["tandem_pb2.py", "tandem_pb2.pyi", "tandem_pb2_grpc.py"])
def test_committed_stubs_are_fresh(tmp_path: Path, name: str) -> None:
    pytest.importorskip("grpc_tools")
    generate.generate(tmp_path)
    committed = (generate.FOLDER / name).read_text()
    assert (tmp_path / name).read_text() == committed, "run python -m tandem.proto.generate"
