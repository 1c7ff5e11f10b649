"""The headers of weights on a hub, as files that can be judged before the rest is downloaded.

A file here has the size of the one on the hub, its header, and a hole instead of the tensors. It
takes the space of the header only, and is read like any other.
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

# Reads the bytes from a first one to before a last one.
ReadRange = Callable[[int, int], bytes]

# Vocabularies of 150,000 tokens take 6 to 10 MB.
_FIRST_GGUF = 12 << 20
_FIRST_SAFETENSORS = 1 << 17
# As the library limits it.
_MAX_SAFETENSORS = 100 << 20
_FACTORS = "rope_"
_MAX_FACTORS = 1 << 16


@contextmanager
def header_folder(repository: str) -> Iterator[Path]:
    """A folder for headers, which errors name as the repository that they are of."""
    with TemporaryDirectory(prefix="tandem-headers-") as folder:
        try:
            yield Path(folder)
        except ModelError as error:
            said = (str(each).replace(folder, repository) for each in error.args)
            raise type(error)(*said) from error


def no_room(model: str, error: OSError) -> ModelError:
    """The error for headers of ``model`` that cannot be kept."""
    if error.errno in FULL:
        return ModelError(
            f"model {model!r}: the disk of {gettempdir()} is full, where its header is kept for a "
            f"moment: free some space, or name another folder by TMPDIR"
        )
    return ModelError(f"model {model!r} cannot be read: {error.strerror}")


def write_gguf_header(read: ReadRange, size: int, target: Path) -> None:
    """Write the header of a GGUF file, and the factors of rope, which are of the configuration.

    Raises ``ModelError`` for a file that has no valid one.
    """
    known = min(_FIRST_GGUF, size)
    data = read(0, known)
    while True:
        _write(target, data, size)
        try:
            header = read_header(target)
        except ModelError:
            # Where the hole was read as the header, it is no valid one.
            if known == size or known >= MAX_HEADER or not data.startswith(MAGIC):
                raise
        else:
            if known == size or _ends_before(header, known):
                break
        more = min(4 * known, size)
        data += read(known, more)
        known = more
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
        end = len(data)  # the library says what is wrong
    if end > len(data):
        data = read(0, end)  # some mirrors give no file from its middle on
    _write(target, data[:end], size)


def _ends_before(header: GGUFHeader, known: int) -> bool:
    """True if nothing of a header lies behind ``known``: its tensors' data begin after it."""
    return min((entry.begin for entry in header.tensors.values()), default=known + 1) <= known


def _write(target: Path, data: bytes, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(data)
        file.truncate(max(size, len(data)))
