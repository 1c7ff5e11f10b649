"""Strategies for input from strangers, mostly mutations of valid input, and bounds on its cost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

# For properties whose examples each start a service, or are read by code that others try as well.
FEWER = settings(max_examples=settings.default.max_examples // 4)  # type: ignore[union-attr]

EXTREMES = [0, 1, 2**7, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes], rounds: int = 4) -> bytes:
    """A valid message after a few random changes."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, rounds))):
        at = draw(st.integers(0, len(data)))
        accident = draw(st.sampled_from(["flip", "cut", "extend", "splice", "number"]))
        if accident == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif accident == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif accident == "extend":
            data[at:at] = draw(st.binary(min_size=1, max_size=64))
        elif accident == "splice":
            data[at:] = draw(valid)[at:]
        elif accident == "number":
            size = draw(st.sampled_from([1, 2, 4, 8]))
            number = draw(st.sampled_from(EXTREMES)) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, draw(st.sampled_from(["little", "big"])))
    return bytes(data)


def strange(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Noise, and nearly valid messages."""
    return st.binary(max_size=300) | mutated(valid)


@contextmanager
def cheap(megabytes: float = 2.0, seconds: float = 5.0) -> Iterator[None]:
    """Check that reading a message takes little memory and CPU, however large its numbers.

    Seconds are of this thread's CPU: other processes may make it last longer.
    """
    tracemalloc.start()
    start = time.thread_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 2**20, f"{peak} bytes were allocated"
    assert time.thread_time() - start < seconds


# ---- protobuf ------------------------------------------------------------------------------------

_INTEGERS = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "",
        "\0",
        "\n",
        "::",
        "[",
        "tcp://[",
        "tcp://*:x",
        "h:²",
        "h:" + "9" * 5000,
        "../..",
        "x" * 999,
    ]
)
_NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, 1e300, float("nan"), float("inf")])


def _value(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.sampled_from([low, 0, 1, high]) | st.integers(low, high)
    if field.cpp_type in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return _NUMBERS
    if field.cpp_type == Field.CPPTYPE_STRING:
        return st.binary(max_size=20) if field.type == Field.TYPE_BYTES else _TEXTS
    if field.cpp_type == Field.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == Field.CPPTYPE_ENUM:
        return st.integers(-1, 5)
    return protos(field.message_type._concrete_class)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def protos(draw: st.DrawFn, kind: type[M]) -> M:
    """Any message of a type."""
    return draw(changed(kind(), len(kind.DESCRIPTOR.fields)))


@st.composite
def changed(draw: st.DrawFn, valid: M, max_changes: int = 3) -> M:
    """A copy of a message with a few fields changed."""
    message = type(valid)()
    message.CopyFrom(valid)
    fields: list[Any] = list(valid.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=max_changes)) if fields else ():
        message.ClearField(field.name)
        target = getattr(message, field.name)
        if _is_map(field):
            key, value = field.message_type.fields
            for name in draw(st.lists(_value(key), max_size=3)):
                target[name] = draw(_value(value))
        elif field.is_repeated:
            target.extend(draw(st.lists(_value(field), max_size=4)))
        elif field.message_type is not None:
            target.CopyFrom(draw(_value(field)))
        else:
            setattr(message, field.name, draw(_value(field)))
    return message
