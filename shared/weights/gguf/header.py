"""The header of a GGUF file: metadata, and where each tensor is. No numpy, no torch.

Files come from strangers, so every count and length is compared with the bytes that are left before
anything of that size is read. The ``gguf`` library trusts them, and imports numpy, which a router
does without.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ....kernels.block_formats import BlockFormat
from ...errors import ModelError
from ...text.lfs_pointer import LFS_POINTER, LFS_REMEDY
from .tensor_types import TENSOR_TYPES, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above what any published model has.
MAX_ELEMENTS = 1 << 21
MAX_KEY = 1 << 16
MAX_HEADER = 1 << 28
MAX_EXPERTS = 1 << 12
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
# The fewest bytes of an entry: the name's length, then type and value, or dimensions and offset.
_LEAST_METADATA, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8

# Types of metadata: numbers by their form in ``struct``, and others.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: ``shape`` as torch has it, the last dimension's values being neighbours, and the
    place of its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockFormat
    begin: int

    @property
    def nbytes(self) -> int:
        return self.type.bytes_of(prod(self.shape))


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """``metadata`` by key; floats of 32 bits are the shortest numbers with the same bits.

    ``unsupported`` has a tensor of each type that is not, by the type's name; ``tensors`` has the
    others."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    unsupported: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file. Raises ``ModelError`` for one that is not whole."""
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
        self._unsupported: dict[str, str] = {}

    def read(self) -> GGUFHeader:
        self._check_magic()
        tensors = self._count("Q", _LEAST_TENSOR, "tensors")
        entries = self._count("Q", _LEAST_METADATA, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string("a metadata key", MAX_KEY)
            if key in metadata:
                raise self._invalid(f"the metadata key {key!r} is there twice")
            metadata[key] = self._value(self._number("I"), key)
        listed = [entry for _ in range(tensors) if (entry := self._tensor()) is not None]
        placed = self._placed(listed, self._alignment(metadata))
        return GGUFHeader(metadata, placed, self._unsupported)

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
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            reason = "it is big-endian" if swapped else f"it has version {version}"
            raise self._unsuitable(f"{reason}; supported: little-endian, versions 2 and 3")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get(_ALIGNMENT, 32)
        if not isinstance(value, int) or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._invalid(f"{_ALIGNMENT} is {value!r}, not a power of two up to 1 MiB")
        return value

    def _tensor(self) -> TensorEntry | None:
        """The next tensor; ``None``, with a note, if its type is not supported."""
        name = self._string("a tensor's name", MAX_KEY)
        dimensions = self._number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self._invalid(f"{name} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, begin = self._number("I"), self._number("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            self._unsupported.setdefault(type_name(number), name)
            return None
        if len(shape) > 2 and shape[0] > MAX_EXPERTS:
            raise self._unsuitable(
                f"{name} is {shape[0]} matrices; at most {MAX_EXPERTS} are supported"
            )
        if min(shape) < 1 or shape[-1] % kind.values:
            raise self._invalid(
                f"{name} has shape {list(shape)}, whose rows are no blocks of {kind.values}"
            )
        return TensorEntry(name, shape, kind, begin)

    def _placed(self, listed: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """The tensors at their places in the file, all of which must be within it."""
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for each in listed:
            if each.name in tensors:
                raise self._invalid(f"tensor {each.name} is there twice")
            if each.begin % alignment:
                raise self._invalid(
                    f"{each.name} begins at {each.begin}, which is no multiple of {alignment}"
                )
            begin = data + each.begin
            if begin + each.nbytes > self._size:
                raise self._truncated(each.name, begin + each.nbytes)
            tensors[each.name] = TensorEntry(each.name, each.shape, each.type, begin)
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._invalid(f"{key} is of the unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        return shortest(value) if kind == _FLOAT else value

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I")
        if kind == _STRING:
            count = self._count("Q", 8, f"elements in {key}")
            return [self._string(key, self._size) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._unsuitable(f"{key} is a list of the unsupported type {kind}")
        form = _NUMBERS[kind]
        size = struct.calcsize(form)
        count = self._count("Q", size, f"elements in {key}")
        return list(struct.unpack(f"<{count}{form}", self._take(count * size, key)))

    def _string(self, purpose: str, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._invalid(f"{purpose} of {length} bytes is longer than {limit}")
        data = self._take(length, purpose)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._invalid(f"{purpose} is not UTF-8: {error}") from None

    def _count(self, form: str, least: int, of: str) -> int:
        """A number of things, each of which takes at least so many bytes."""
        count: int = self._number(form)
        if count > MAX_ELEMENTS or count * least > self._size - self._at:
            raise self._invalid(f"it counts {count} {of}, more than it has room for")
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


def shortest(value: float) -> float:
    """The shortest decimal with the same 32 bits, which is what a converter was given: 1e-05 and
    not 9.999999747378752e-06."""
    bits = struct.pack("<f", value) if abs(value) < 3e38 else b""
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == bits), value)
