"""The codec: any declared value survives, any other is rejected by the name of its field."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.wire.codec import Codec, CodecError, VersionError


@dataclass(frozen=True)
class Inner:
    number: int
    text: str = ""


@dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None = None
    scalar: int | str | None = None
    rate: float = 0.0
    flag: bool = False
    data: bytes = b""
    side: Literal["send", "receive"] = "send"
    items: list[Inner] = field(default_factory=list)
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    table: dict[int, list[Inner]] = field(default_factory=dict)


@dataclass(frozen=True)
class Empty:
    pass


CODEC: Codec[Any] = Codec((Outer, Inner, Empty), 10_000)
INT64 = st.integers(-(1 << 63), (1 << 64) - 1)
INNER = st.builds(Inner, INT64, st.text(max_size=5))
OUTER = st.builds(
    Outer,
    inner=INNER,
    maybe=st.none() | INNER,
    scalar=st.none() | INT64 | st.text(max_size=5),
    rate=st.floats(allow_nan=False),
    flag=st.booleans(),
    data=st.binary(max_size=5),
    side=st.sampled_from(["send", "receive"]),
    items=st.lists(INNER, max_size=3),
    names=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    pair=st.tuples(INT64, st.floats(allow_nan=False)),
    table=st.dictionaries(INT64, st.lists(INNER, max_size=2), max_size=3),
)


@given(OUTER | INNER | st.just(Empty()))
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


def wire(**changes: Any) -> bytes:
    """An ``Outer`` on the wire, with other values in some fields."""
    data = CODEC.encode(Outer(Inner(1)))
    fields = msgpack.unpackb(data[8:], strict_map_key=False) | changes
    return data[:8] + bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": {"number": "1"}}, r"Outer: Expected `int`, got `str` - at `\$\.inner\.number`"),
        ({"inner": {"number": True}}, r"Expected `int`, got `bool` - at `\$\.inner\.number`"),
        ({"inner": {}}, r"missing required field `number` - at `\$\.inner`"),
        ({"inner": [1, ""]}, r"Expected `object`, got `array` - at `\$\.inner`"),
        ({"maybe": 5}, r"Expected `object \| null`, got `int` - at `\$\.maybe`"),
        ({"scalar": 0.5}, r"Expected `int \| str \| null`, got `float` - at `\$\.scalar`"),
        ({"rate": "x" * 99}, r"Expected `float`, got `str` - at `\$\.rate`"),
        ({"flag": 1}, r"Expected `bool`, got `int` - at `\$\.flag`"),
        ({"data": 1}, r"Expected `bytes`, got `int` - at `\$\.data`"),
        ({"side": "other"}, r"Invalid enum value 'other' - at `\$\.side`"),
        ({"items": [{"number": 1}, {"number": None}]}, r"at `\$\.items\[1\]\.number`"),
        ({"names": "ab"}, r"Expected `array`, got `str` - at `\$\.names`"),
        ({"pair": [1, 2.0, 3]}, r"`array` of length 2"),
        ({"pair": [1, None]}, r"at `\$\.pair\[1\]`"),
        ({"table": {"a": []}}, r"Expected `int`, got `str` - at `key` in `\$\.table`"),
        ({"table": []}, r"Expected `object`, got `array` - at `\$\.table`"),
    ],
)
def test_a_value_that_is_not_what_its_field_declares_is_rejected_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        CODEC.decode(wire(**changes))


def head(tag: int, version: int = CODEC.version) -> bytes:
    return struct.pack("<II", version, tag)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        head(2)[:7],
        head(2),
        head(3) + msgpack.packb({}),
        head(2, CODEC.version ^ 1) + msgpack.packb({}),
        head(2) + b"\xc1",
        head(2) + msgpack.packb(7),
        head(2) + msgpack.packb({}) + b"\xc0",
        head(0) + msgpack.packb(msgpack.ExtType(1, b"x")),
        head(2) + b"\x00" * 10_001,
    ],
)
def test_bytes_that_are_no_message_are_rejected(data: bytes) -> None:
    with pytest.raises(CodecError):
        CODEC.decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_rejected(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        CODEC.decode(data)


def test_a_message_that_the_other_end_would_reject_is_not_sent() -> None:
    with pytest.raises(CodecError, match="the limit is 10000"):
        CODEC.encode(Outer(Inner(1), data=b"x" * 10_000))


@pytest.mark.parametrize(
    "fields",
    [
        [("number", int)],
        [("text", str), ("number", int)],
        [("number", int), ("words", str)],
        [("number", int | None), ("text", str)],
    ],
)
def test_another_declaration_of_a_type_is_another_version(fields: list[tuple[str, Any]]) -> None:
    def codec(inner: type) -> Codec[Any]:
        return Codec((make_dataclass("Whole", [("inner", inner)]),), 100)

    here = codec(make_dataclass("Inner", [("number", int), ("text", str)]))
    there = codec(make_dataclass("Inner", fields))
    with pytest.raises(VersionError, match=f"of version {there.version:08x}.*Restart it"):
        here.decode(head(0, there.version))


@pytest.mark.parametrize("hint", [Any, object, list[Any], Inner | Empty])
def test_a_type_that_cannot_be_checked_is_no_field(hint: Any) -> None:
    with pytest.raises(TypeError, match=r"must not have a field|may not contain more than one"):
        Codec((make_dataclass("Bad", [("field", hint)]),), 100)
