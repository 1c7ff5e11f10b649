"""A digest of a checkpoint, in which hosts that load it for one node must agree. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from .file_reads import FileReads

# Bytes that are read of a tensor, and the number of tensors that are read: mixtures of experts have
# tens of thousands. Another training changes some value in the first row of nearly every tensor.
_BYTES = 4096
_TENSORS = 1000


class StoredTensor(NamedTuple):
    """A tensor as it lies in its file; ``format`` is its dtype or block format."""

    name: str
    format: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int


def weights_digest(tensors: Iterable[StoredTensor]) -> str:
    """The number of tensors, their formats, and a digest of names, formats, shapes and samples of
    the values. How the tensors are divided into files makes no difference. Raises ``ModelError``.
    """
    ordered = sorted(tensors)
    digest = blake2b(digest_size=8)
    for each in ordered:
        digest.update(repr(each[:3]).encode())
    with FileReads() as reads:
        for each in ordered[:: len(ordered) // _TENSORS + 1]:
            count = min(_BYTES, each.nbytes)
            digest.update(reads.bytes_at(each.file, each.begin, count, each.name))
    formats = ", ".join(sorted({each.format for each in ordered}))
    return f"{len(ordered)} tensors of {formats} ({digest.hexdigest()})"
