"""Regenerate the stubs: ``python -m tandem.proto.generate``.

protoc writes ``import tandem_pb2`` into the service stub, which only works when the folder is on
``sys.path``; the import is made relative here. mypy-protobuf writes the types of the services. A
test checks that the committed stubs are fresh.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def generate(out: Path) -> None:
    """Write the modules of both ``.proto`` files, with their types, into ``out``."""
    types = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    plugin = (
        f"--plugin=protoc-gen-mypy_grpc={types}",
        f"--mypy_grpc_out=quiet,generate_concrete_servicer_stubs:{out}",
    )
    _compile(out, "tandem.proto", f"--grpc_python_out={out}", *plugin)
    _compile(out, "sentencepiece.proto")
    for stub in (out / "tandem_pb2_grpc.py", out / "tandem_pb2_grpc.pyi"):
        text = stub.read_text().replace("import tandem_pb2 as", "from . import tandem_pb2 as")
        stub.write_text(text)


def _compile(out: Path, name: str, *options: str) -> None:
    from grpc_tools import protoc

    folders = (f"-I{FOLDER}", f"--python_out={out}", f"--pyi_out={out}")
    status = protoc.main(["protoc", *folders, *options, str(FOLDER / name)])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status} on {FOLDER / name}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
