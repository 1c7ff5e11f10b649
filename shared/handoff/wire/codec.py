"""Dataclasses and named tuples as msgpack, checked against their type hints on arrival.

A ``Codec`` knows a closed set of message types. A message begins with a version and a tag, both
little-endian and 32 bits: the tag is the type's position in the set. The body is msgspec's. The
version is a digest of every type, field name and hint, so processes of different versions reject
each other's messages instead of misreading them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any, Generic, TypeVar, get_args
from typing import get_type_hints as hints_of

import msgspec

T = TypeVar("T")
_HEADER = Struct("<II")


class CodecError(ValueError):
    """A message does not match its type."""


class VersionError(CodecError):
    """A message comes from a process with other message types."""


class Codec(Generic[T]):
    """Bytes to and from the message types of ``kinds``."""

    def __init__(self, kinds: Sequence[type[T]], max_bytes: int) -> None:
        self.kinds = tuple(kinds)
        self._tags = {kind: tag for tag, kind in enumerate(self.kinds)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = [msgspec.msgpack.Decoder(kind) for kind in self.kinds]
        self._max_bytes = max_bytes
        self.version = _digest(self.kinds)

    def encode(self, message: T) -> bytes:
        """Encode a message. Raises ``CodecError`` if it exceeds the limit."""
        tag = self._tags[type(message)]
        data = _HEADER.pack(self.version, tag) + self._encoder.encode(message)
        self._check_size(data)
        return data

    def decode(self, data: bytes) -> T:
        """Decode a message. Raises ``CodecError``; ``VersionError`` for another version."""
        self._check_size(data)
        if len(data) < _HEADER.size:
            raise CodecError(
                f"message of {len(data)} bytes is too short for its header of {_HEADER.size}"
            )
        version, tag = _HEADER.unpack_from(data)
        if version != self.version:
            raise VersionError(
                f"message of version {version:08x}, not {self.version:08x}; was Tandem updated "
                f"while this node ran? Restart it"
            )
        if tag >= len(self.kinds):
            raise CodecError(f"message type {tag}; known are 0 to {len(self.kinds) - 1}")
        try:
            message: T = self._decoders[tag].decode(memoryview(data)[_HEADER.size :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"{self.kinds[tag].__name__}: {error}") from None
        return message

    def _check_size(self, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise CodecError(f"message of {len(data)} bytes; the limit is {self._max_bytes}")


def _digest(kinds: Sequence[type]) -> int:
    """32 bits over the declarations of ``kinds`` and of every type with fields inside them."""
    declarations: dict[str, str] = {}
    for kind in kinds:
        _declare(kind, declarations)
    text = "\n".join([*(kind.__name__ for kind in kinds), *declarations.values()])
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


def _declare(hint: Any, declarations: dict[str, str]) -> None:
    if hint in (Any, object):
        raise TypeError(f"a message must not have a field of type {hint}, which cannot be checked")
    if not dataclasses.is_dataclass(hint) and not hasattr(hint, "_fields"):
        for inner in get_args(hint):
            _declare(inner, declarations)
        return
    name = getattr(hint, "__name__", "")
    if name in declarations:
        return
    fields = hints_of(hint, include_extras=True)
    declarations[name] = f"{name}({fields})"
    for inner in fields.values():
        _declare(inner, declarations)
