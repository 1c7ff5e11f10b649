from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.handoff.plane import messages
from tandem.shared.handoff.plane.messages import Cancelled, from_wire, to_wire
from tandem.shared.handoff.wire.codec import CodecError

SAMPLES = st.one_of([st.from_type(kind) for kind in messages._CODEC.kinds])


@given(SAMPLES)
def test_every_message_survives_the_round_trip(message):
    try:
        wire = to_wire(message)
    except (OverflowError, UnicodeEncodeError):
        return  # numbers beyond 64 bits and lone surrogates have no place on the wire
    again = from_wire(wire)
    assert type(again) is type(message)
    assert to_wire(again) == wire


@given(st.binary(max_size=100))
def test_garbage_is_refused(garbage):
    try:
        from_wire(garbage)
    except CodecError:
        return
    assert to_wire(from_wire(garbage))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [99],
        [-1],
        ["0"],
        [True, 1, 1],
        [2, 1],
        [2, 1, "x"],
        [2, 1, True],
        [2, 1, 2, 3],
        [3, {"a": 1}],
    ],
)
def test_a_message_of_another_shape_is_refused(values):
    with pytest.raises(CodecError):
        from_wire(bytes(msgpack.packb([messages._CODEC.version, *values])))


def test_a_side_that_does_not_exist_is_refused():
    wire = to_wire(Cancelled(transfer_id=1, attempt=1, side="send"))
    with pytest.raises(CodecError, match="side"):
        from_wire(wire.replace(b"send", b"sent"))
