"""Regenerate the gRPC stubs: ``python -m tandem.proto.generate``.

protoc writes ``import tandem_pb2`` into the service stub, which only works when the folder is on
``sys.path``; the import is made relative here. A test checks that the committed stubs are fresh.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def generate(out: Path) -> None:
    """Write ``tandem_pb2.py``, its ``.pyi`` and ``tandem_pb2_grpc.py`` into ``out``."""
    from grpc_tools import protoc

    status = protoc.main(
        [
            "protoc",
            f"-I{FOLDER}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            str(FOLDER / "tandem.proto"),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status} on {FOLDER / 'tandem.proto'}")
    stub = out / "tandem_pb2_grpc.py"
    text = stub.read_text().replace("import tandem_pb2 as", "from . import tandem_pb2 as")
    stub.write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
