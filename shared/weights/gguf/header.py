"""The header of a GGUF file: metadata, and the place of each tensor. No numpy, no torch.

Files are not trusted: every count and length is compared with the remaining bytes before anything
of that size is read, so a header takes a few times its size in memory. The ``gguf`` library does
not check, and imports numpy, which routers do without.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ....kernels.block_formats import BlockFormat
from ...errors import ModelError, brief
from ...text.model_files import LFS_POINTER, LFS_REMEDY
from .tensor_types import TENSOR_TYPES, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above any published model: 70,000 matrices of experts, a million tokens and merges (20 MB).
MAX_HEADER = 1 << 26
MAX_ENTRIES = 1 << 16
# Elements of all lists, and matrices of all tensors.
MAX_ELEMENTS = 1 << 22
MAX_MATRICES = 1 << 18
MAX_KEY = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
# The minimum size of an entry: the name's length, then type and value, or dimensions and offset.
_MIN_METADATA_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8

# Types of metadata: numbers by their ``struct`` format, and others.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: ``shape`` in torch's order, the last dimension being contiguous, and the offset of
    its first byte in its file."""

    name: str
    shape: tuple[int, ...]
    type: BlockFormat
    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return self.type.bytes_of(prod(self.shape))


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``metadata`` by key; 32-bit floats are the shortest decimals with the same bits, and lists of
    numbers are arrays.

    ``unsupported`` has an example tensor of each unsupported type, by the type's name; ``tensors``
    has the others."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    unsupported: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file. Raises ``ModelError`` if it is invalid or truncated."""
    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


class _HeaderReader:
    """Reads one open file from its beginning."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        self._at = 0
        self._elements = 0
        self._unsupported: dict[str, str] = {}

    def read(self) -> GGUFHeader:
        self._check_magic()
        tensors = self._count(_MIN_TENSOR_BYTES, MAX_ENTRIES, "tensors")
        entries = self._count(_MIN_METADATA_BYTES, MAX_ENTRIES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._invalid(f"the metadata key {key[:100]!r} is there twice")
            metadata[key] = self._value(self._number("I"), key)
        tensor_entries = [entry for _ in range(tensors) if (entry := self._tensor()) is not None]
        by_name = self._by_name(tensor_entries, self._alignment(metadata))
        return GGUFHeader(metadata, by_name, self._unsupported)

    def _check_magic(self) -> None:
        magic = self._take(4, "the magic number")
        if magic == LFS_POINTER[:4]:
            raise ModelError(f"{self._path} is {LFS_REMEDY}")
        if magic != MAGIC:
            raise ModelError(
                f"{self._path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
            )
        version = self._number("I")
        if version not in VERSIONS:
            is_big_endian = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            reason = "it is big-endian" if is_big_endian else f"it has version {version}"
            raise self._unsuitable(f"{reason}; supported: little-endian, versions 2 and 3")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get(_ALIGNMENT, 32)
        if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._invalid(f"{_ALIGNMENT} is {brief(value)}, not a power of two up to 1 MiB")
        return value

    def _tensor(self) -> TensorEntry | None:
        """The next tensor; ``None`` if its type is unsupported, which is recorded."""
        name = self._name("a tensor's name")
        dimensions = self._number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self._invalid(
                f"{name:.100} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, begin = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            self._unsupported.setdefault(type_name(number), name)
            return None
        if min(shape) < 1 or shape[-1] % kind.values:
            raise self._invalid(
                f"{name:.100} has shape {list(shape)}, whose rows are not blocks of {kind.values}"
            )
        return TensorEntry(name, shape, kind, self._path, begin)

    def _by_name(self, entries: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """The tensors by name, with absolute offsets, all of which must be within the file."""
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for each in entries:
            if each.name in tensors:
                raise self._invalid(f"tensor {each.name:.100} is there twice")
            if each.begin % alignment:
                raise self._invalid(
                    f"{each.name:.100} begins at {each.begin}, not a multiple of {alignment}"
                )
            begin = data + each.begin
            if begin + each.nbytes > self._size:
                raise self._truncated(each.name, begin + each.nbytes)
            tensors[each.name] = replace(each, begin=begin)
        self._check_apart(tensors.values())
        if (count := matrices(entries)) > MAX_MATRICES:
            raise self._unsuitable(
                f"its tensors are {count} matrices; at most {MAX_MATRICES} are supported"
            )
        return tensors

    def _check_apart(self, tensors: Iterable[TensorEntry]) -> None:
        """Reject tensors that share bytes."""
        for first, second in pairwise(sorted(tensors, key=lambda each: each.begin)):
            if second.begin < first.begin + first.nbytes:
                raise self._invalid(f"{first.name:.100} and {second.name:.100} overlap")

    def _value(self, kind: int, key: str) -> object:
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._invalid(f"{key:.100} is of the unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        return shortest(value) if kind == _FLOAT else value

    def _array(self, key: str) -> list[str] | list[bool] | array[Any]:
        kind = self._number("I")
        if kind == _STRING:
            count = self._elements_of(key, 8)
            return [self._string(key, self._size) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._unsuitable(f"{key:.100} is a list of the unsupported type {kind}")
        form = _NUMBERS[kind]
        size = struct.calcsize(f"<{form}")
        data = self._take(self._elements_of(key, size) * size, key)
        if form == "?":
            return [bool(byte) for byte in data]
        numbers = array(form, data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _elements_of(self, key: str, min_bytes: int) -> int:
        remaining = MAX_ELEMENTS - self._elements
        count = self._count(min_bytes, remaining, f"elements in {key}")
        self._elements += count
        return count

    def _name(self, purpose: str) -> str:
        """Read a printable text, which errors may quote."""
        name = self._string(purpose, MAX_KEY)
        if not name.isprintable():
            raise self._invalid(f"{purpose} is {name[:100]!r}, with unprintable characters")
        return name

    def _string(self, purpose: str, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._invalid(f"{purpose:.100} of {length} bytes is longer than {limit}")
        data = self._take(length, purpose)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            place = f"{error.reason} at its byte {error.start}"
            raise self._invalid(f"{purpose:.100} is not UTF-8: {place}") from None

    def _count(self, min_bytes: int, limit: int, of: str) -> int:
        """Read a count of items, each of which takes at least ``min_bytes``."""
        count: int = self._number("Q")
        if count * min_bytes > self._size - self._at:
            raise self._invalid(f"it counts {count} {of:.100}, more than it has room for")
        if count > limit:
            raise self._unsuitable(f"it counts {count} {of:.100}, of which {limit} are supported")
        return count

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(form), "a number"))
        return value

    def _take(self, count: int, purpose: str) -> bytes:
        if count > self._size - self._at:
            raise self._truncated(purpose, self._at + count)
        if self._at + count > MAX_HEADER:
            raise self._unsuitable(f"its header is longer than {MAX_HEADER} bytes")
        data = self._file.read(count)
        if len(data) < count:
            raise self._truncated(purpose, self._at + count)
        self._at += count
        return data

    def _truncated(self, purpose: str, end: int) -> ModelError:
        return ModelError(
            f"{self._path} is truncated: {purpose:.100} ends at byte {end}, and the file has "
            f"{self._size}; download it again"
        )

    def _invalid(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is not a valid GGUF file: {problem}; download it again")

    def _unsuitable(self, problem: str) -> ModelError:
        return ModelError(f"{self._path} is a GGUF file that cannot be loaded: {problem}")


def matrices(tensors: Iterable[TensorEntry]) -> int:
    """The number of matrices in tensors."""
    return sum(prod(each.shape[:-2]) for each in tensors)


def shortest(value: float) -> float:
    """The shortest decimal with the same 32 bits, as a converter read it: 1e-05 instead of
    9.999999747378752e-06."""
    bits = struct.pack("<f", value) if abs(value) < 3e38 else b""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == bits), value)
