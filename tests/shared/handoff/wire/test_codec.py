"""The codec: any declared value survives, any other is rejected by the name of its field."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.wire.codec import Codec, CodecError, VersionError
from tandem.shared.handoff.wire.packed import Uint32s


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
    ids: Uint32s = field(default_factory=list)


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
    ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=9),
)


@given(OUTER | INNER | st.just(Empty()))
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


def wire(**changes: Any) -> bytes:
    """An ``Outer`` on the wire, with other values in some fields."""
    version, tag, *values = msgpack.unpackb(CODEC.encode(Outer(Inner(1))), strict_map_key=False)
    fields = dict(zip(Outer.__dataclass_fields__, values, strict=True)) | changes
    return bytes(msgpack.packb([version, tag, *fields.values()]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner": ["1", ""]}, r"Outer\.inner\.number is '1', not int"),
        ({"inner": [True, ""]}, r"Outer\.inner\.number is True, not int"),
        ({"inner": [1]}, r"Outer\.inner is \[1\], not a list of 2 fields"),
        ({"inner": {}}, r"Outer\.inner is \{\}, not a list of 2 fields"),
        ({"maybe": 5}, r"Outer\.maybe is 5, not a list of 2 fields"),
        ({"scalar": 0.5}, r"Outer\.scalar is 0\.5, not int or str or NoneType"),
        ({"rate": "x" * 99}, r"Outer\.rate is 'x{59}\.\.\., not float"),
        ({"flag": 1}, r"Outer\.flag is 1, not bool"),
        ({"data": "text"}, r"Outer\.data is 'text', not bytes"),
        ({"side": "other"}, r"Outer\.side is 'other', not one of 'send', 'receive'"),
        ({"items": [[1, ""], [2, None]]}, r"Outer\.items\[1\]\.text is None, not str"),
        ({"names": "ab"}, r"Outer\.names is 'ab', not a list"),
        ({"pair": [1, 2.0, 3]}, r"Outer\.pair is \[1, 2\.0, 3\], not a list of 2 fields"),
        ({"pair": [1, None]}, r"Outer\.pair\[1\] is None, not float"),
        ({"table": {"a": []}}, r"Outer\.table\[0\] is 'a', not int"),
        ({"table": []}, r"Outer\.table is \[\], not a map"),
        ({"ids": b"123"}, r"Outer\.ids is b'123', not packed 32-bit integers"),
        ({"ids": [1]}, r"Outer\.ids is \[1\], not packed"),
    ],
)
def test_a_value_that_is_not_what_its_field_declares_is_rejected_by_name(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CodecError, match=said):
        CODEC.decode(wire(**changes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([]),
        msgpack.packb({"a": 1}),
        msgpack.packb(["1", 1]),
        msgpack.packb([CODEC.version]),
        msgpack.packb([CODEC.version, 3]),
        msgpack.packb([CODEC.version, -1]),
        msgpack.packb([CODEC.version, True]),
        msgpack.packb([CODEC.version, 2, 1]),
        msgpack.packb(msgpack.ExtType(1, b"x")),
        b"\x00" * 10_001,
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
        here.decode(bytes(msgpack.packb([there.version, 0, [1, ""]])))


@pytest.mark.parametrize("hint", [Any, set[int], Inner | Empty, object])
def test_a_type_that_cannot_be_checked_is_no_field(hint: Any) -> None:
    with pytest.raises(TypeError, match="may not have a field"):
        Codec((make_dataclass("Bad", [("field", hint)]),), 100)
