"""Dataclasses as msgpack, checked against their type hints on arrival.

A ``Codec`` knows a closed set of message types. A message is ``[version, tag, field, ...]``: the
tag is the type's position in the set, and fields stand in the order of the dataclass; a nested
dataclass is a list of its fields. The version is a digest of every type, field name and hint, so
processes of different versions reject each other's messages instead of misreading them.

Hints may be ``int``, ``float``, ``str``, ``bool``, ``bytes``, ``Literal``, other dataclasses,
``list``, ``tuple`` and ``dict`` of these, and unions of ``None`` and scalars with at most
one other hint. ``Uint32s`` (``list[int]``) is sent as packed bytes: that is cheaper than a list of
numbers in both directions, and needs no check of each element.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

import msgpack

from .packed import PACKED

T = TypeVar("T")
_UINT32: Final = "I"
_SCALARS = (int, float, str, bool, bytes, NoneType)
_SHOWN = 60


class CodecError(ValueError):
    """A message that is not what its type declares."""


class VersionError(CodecError):
    """A message of a process with other message types."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Converter:
    """Both directions for one hint. ``encode`` is ``None`` for values that msgpack takes as is.

    ``by_type``: a value that was accepted once may be replaced by any other of its type.
    """

    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]
    by_type: bool = False


class Codec(Generic[T]):
    """Bytes to and from the message types of ``kinds``."""

    def __init__(self, kinds: Sequence[type[T]], max_bytes: int) -> None:
        self.kinds = tuple(kinds)
        self._tags = {kind: tag for tag, kind in enumerate(self.kinds)}
        self._converters = [_dataclass(kind) for kind in self.kinds]
        self._max_bytes = max_bytes
        self.version = _digest(self.kinds)

    def encode(self, message: T) -> bytes:
        """Raises ``CodecError`` for a message over the limit, which the other end would reject."""
        tag = self._tags[type(message)]
        encode = self._converters[tag].encode
        assert encode is not None, "a dataclass is never sent as is"
        data: bytes = msgpack.packb([self.version, tag, *encode(message)])
        self._check_size(data)
        return data

    def decode(self, data: bytes) -> T:
        """Raises ``CodecError``; ``VersionError`` for a message of another version."""
        self._check_size(data)
        try:
            values = msgpack.unpackb(data, strict_map_key=False, max_ext_len=0)
        except Exception as error:  # msgpack raises a dozen unrelated types on invalid input
            raise CodecError(f"message is not msgpack of the expected shape: {error}") from None
        if not isinstance(values, list) or [type(value) for value in values[:2]] != [int, int]:
            raise CodecError("message is not a list that begins with its version and type")
        version, tag, *fields = values
        if version != self.version:
            raise VersionError(
                f"message of version {version:08x}, not {self.version:08x}; was Tandem updated "
                f"while this node ran? Restart it"
            )
        if not 0 <= tag < len(self.kinds):
            raise CodecError(f"message type {tag}; known are 0 to {len(self.kinds) - 1}")
        try:
            message: T = self._converters[tag].decode(fields)
        except CodecError as error:
            raise CodecError(f"{self.kinds[tag].__name__}{error}") from None
        return message

    def _check_size(self, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise CodecError(f"message of {len(data)} bytes; the limit is {self._max_bytes}")


def _digest(kinds: Sequence[type]) -> int:
    """32 bits over the declarations of ``kinds`` and of every dataclass inside them."""
    declarations: dict[str, str] = {}
    for kind in kinds:
        _declare(kind, declarations)
    text = "\n".join([*(kind.__name__ for kind in kinds), *declarations.values()])
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


def _declare(hint: Any, declarations: dict[str, str]) -> None:
    if not dataclasses.is_dataclass(hint):
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


# ---- converters of one hint each -------------------------------------------------------------


def _converter(hint: Any) -> _Converter:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    if hint in _SCALARS:
        return _scalar(hint)
    if origin is Annotated and PACKED in hint.__metadata__:
        return _packed()
    if origin is Literal:
        return _literal(hint)
    if origin is tuple and ... not in get_args(hint):
        labels = [f"[{at}]" for at in range(len(get_args(hint)))]
        return _fixed(get_args(hint), labels, lambda *values: values)
    if origin in (list, tuple):
        return _items(hint)
    if origin is dict:
        return _mapping(hint)
    if origin in (Union, UnionType):
        return _union(hint)
    raise TypeError(f"a message may not have a field of type {hint}")


def _scalar(kind: type) -> _Converter:
    accepted = (int, float) if kind is float else (kind,)

    def decode(value: Any) -> Any:
        if type(value) not in accepted:
            raise _unfit(value, kind.__name__)
        return value

    return _Converter(None, decode, by_type=True)


def _literal(hint: Any) -> _Converter:
    allowed = get_args(hint)

    def decode(value: Any) -> Any:
        if type(value) not in map(type, allowed) or value not in allowed:
            raise _unfit(value, f"one of {', '.join(map(repr, allowed))}")
        return value

    return _Converter(None, decode)


def _packed() -> _Converter:
    def encode(values: Sequence[int]) -> bytes:
        try:
            return array(_UINT32, values).tobytes()
        except (TypeError, OverflowError) as error:
            raise CodecError(f"ids must be unsigned and at most 32 bits: {error}") from None

    def decode(value: Any) -> Any:
        if type(value) is not bytes or len(value) % 4:
            raise _unfit(value, "packed 32-bit integers")
        return memoryview(value).cast(_UINT32).tolist()

    return _Converter(encode, decode)


def _items(hint: Any) -> _Converter:
    build = get_origin(hint)
    item = _converter(get_args(hint)[0])

    def encode(values: Sequence[Any]) -> list[Any]:
        assert item.encode is not None
        return [item.encode(value) for value in values]

    def decode(values: Any) -> Any:
        if type(values) is not list:
            raise _unfit(values, "a list")
        return build(_each(item.decode, values)) if values else build()

    return _Converter(item.encode and encode, decode)


def _each(decode: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    decoded: list[Any] = []
    try:
        for value in values:
            decoded.append(decode(value))
    except CodecError as error:
        raise CodecError(f"[{len(decoded)}]{error}") from None
    return decoded


def _mapping(hint: Any) -> _Converter:
    key, value = (_converter(inner) for inner in get_args(hint))
    if key.encode is not None:
        raise TypeError(f"a message may not have a field of type {hint}")

    def encode(values: dict[Any, Any]) -> dict[Any, Any]:
        assert value.encode is not None
        return {name: value.encode(item) for name, item in values.items()}

    def decode(values: Any) -> Any:
        if type(values) is not dict:
            raise _unfit(values, "a map")
        names = _each(key.decode, list(values))
        return dict(zip(names, _each(value.decode, list(values.values())), strict=True))

    return _Converter(value.encode and encode, decode)


def _union(hint: Any) -> _Converter:
    members = get_args(hint)
    scalars = tuple(member for member in members if member in _SCALARS)
    others = [_converter(member) for member in members if member not in scalars]
    if len(others) > 1:
        raise TypeError(f"a message may not have a field of type {hint}")
    accepted = (*scalars, int) if float in scalars else scalars
    expected = " or ".join(member.__name__ for member in scalars)

    def decode(value: Any) -> Any:
        if type(value) in accepted:
            return value
        if not others:
            raise _unfit(value, expected)
        return others[0].decode(value)

    if not others or others[0].encode is None:
        return _Converter(None, decode, by_type=not others)
    inner = others[0].encode
    return _Converter(lambda value: value if type(value) in accepted else inner(value), decode)


def _dataclass(kind: type) -> _Converter:
    hints = hints_of(kind, include_extras=True)
    names = tuple(hints)
    read = _fields(names)

    def by_name(*values: Any) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    make = by_name if any(item.kw_only for item in dataclasses.fields(kind)) else kind
    fields = _fixed(tuple(hints.values()), [f".{name}" for name in names], make)
    encode = fields.encode
    encode_fields = read if encode is None else lambda message: encode(read(message))
    return _Converter(encode_fields, fields.decode)


def _fixed(hints: tuple[Any, ...], labels: Sequence[str], make: Callable[..., Any]) -> _Converter:
    """Values with a hint each, of which ``make`` builds one; ``labels`` name them in errors."""
    converters = [_converter(hint) for hint in hints]
    encoders = [(at, each.encode) for at, each in enumerate(converters) if each.encode is not None]
    plain = [(at, each.decode) for at, each in enumerate(converters) if each.by_type]
    nested = [(at, each.decode) for at, each in enumerate(converters) if not each.by_type]
    # Types of values on the wire with which no field but the nested ones needs another look.
    good: set[tuple[type, ...]] = set()

    def encode(values: Iterable[Any]) -> list[Any]:
        encoded = list(values)
        for at, convert in encoders:
            encoded[at] = convert(encoded[at])
        return encoded

    def decode(values: Any) -> Any:
        if type(values) is not list or len(values) != len(labels):
            raise _unfit(values, f"a list of {len(labels)} fields")
        types, at = tuple(map(type, values)), 0
        try:
            if types not in good:
                for at, convert in plain:
                    convert(values[at])
                good.add(types)
            for at, convert in nested:
                values[at] = convert(values[at])  # in place: msgpack has just made the list
        except CodecError as error:
            raise CodecError(f"{labels[at]}{error}") from None
        return make(*values)

    return _Converter(encode if encoders else None, decode)


def _fields(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _unfit(value: Any, expected: str) -> CodecError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return CodecError(f" is {shown}, not {expected}")
