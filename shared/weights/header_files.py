"""The headers of weights on a hub, as files that can be checked before the rest is downloaded.

Such a file has the size of the one on the hub, its header, and a hole in place of the tensors. It
takes the disk space of the header only, and is read like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from ..errors import ModelError
from .gguf.header import MAGIC, MAX_HEADER, GGUFHeader, read_header
from .transfer import FULL

# Reads a range of bytes: begin, and end (exclusive).
ReadRange = Callable[[int, int], bytes]

# Vocabularies of 150,000 tokens take 6 to 10 MB.
_FIRST_GGUF = 12 << 20
_FIRST_SAFETENSORS = 1 << 17
# The library's limit.
_MAX_SAFETENSORS = 100 << 20
_FACTORS = "rope_"
_MAX_FACTORS = 1 << 16


@contextmanager
def header_folder(repository: str) -> Iterator[Path]:
    """A temporary folder for headers; errors name the repository instead."""
    with TemporaryDirectory(prefix="tandem-headers-") as folder:
        try:
            yield Path(folder)
        except ModelError as error:
            messages = (str(each).replace(folder, repository) for each in error.args)
            raise type(error)(*messages) from error


def no_room(model: str, error: OSError) -> ModelError:
    """The error for headers of ``model`` that cannot be stored."""
    if error.errno in FULL:
        return ModelError(
            f"model {model!r}: the disk of {gettempdir()} is full, where its header is kept for a "
            f"moment: free some space, or name another folder by TMPDIR"
        )
    return ModelError(f"model {model!r} cannot be read: {error.strerror}")


def write_gguf_header(read: ReadRange, size: int, target: Path) -> None:
    """Write the header of a GGUF file, and the rope factors, which belong to the configuration.

    Raises ``ModelError`` for an invalid header.
    """
    length = min(_FIRST_GGUF, size)
    data = read(0, length)
    while True:
        _write(target, data, size)
        try:
            header = read_header(target)
        except ModelError:
            # Invalid if the header reaches into the hole.
            if length == size or length >= MAX_HEADER or not data.startswith(MAGIC):
                raise
        else:
            if length == size or _ends_before(header, length):
                break
        more = min(4 * length, size)
        data += read(length, more)
        length = more
    for entry in header.tensors.values():
        if entry.name.startswith(_FACTORS) and entry.nbytes <= _MAX_FACTORS:
            with target.open("r+b") as file:
                file.seek(entry.begin)
                file.write(read(entry.begin, entry.begin + entry.nbytes))


def write_safetensors_header(read: ReadRange, size: int, target: Path) -> None:
    """Write the header of a safetensors file, whose length is its first eight bytes."""
    data = read(0, min(_FIRST_SAFETENSORS, size))
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    end = min(8 + length, size)
    if length > _MAX_SAFETENSORS:
        end = len(data)  # the library reports the error
    if end > len(data):
        data = read(0, end)  # some mirrors only serve ranges from the beginning
    _write(target, data[:end], size)


def _ends_before(header: GGUFHeader, length: int) -> bool:
    """True if a header is within the first ``length`` bytes: tensor data begins after it."""
    return min((entry.begin for entry in header.tensors.values()), default=length + 1) <= length


def _write(target: Path, data: bytes, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(data)
        file.truncate(max(size, len(data)))
