from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.errors import PeerRefusedError
from tandem.shared.handoff.wire import greeting
from tandem.shared.handoff.wire.frame import FrameError
from tandem.shared.handoff.wire.greeting import Greeting

ME = Greeting(
    max_payload=1 << 20,
    node_id="p",
    epoch=1,
    rank=0,
    tp_size=1,
    dtype="bfloat16",
    layers=["K 64, V 64", "latent 576"],
    offers={"fast": b"how to reach it", "tcp": b""},
    kv_scales=greeting.packed_scales([0.5, 0.25, 3.0]),
)


def test_a_greeting_survives_the_round_trip() -> None:
    again = greeting.decode(greeting.encode(ME))
    assert again == ME and again.scales == (0.5, 0.25, 3.0)


def test_a_peer_may_have_other_scales_of_kv_or_none() -> None:
    other = replace(ME, kv_scales=greeting.packed_scales([0.5, 0.25, 4.0]))
    for mine, theirs in (
        (ME, other),
        (ME, replace(ME, kv_scales=b"")),
        (replace(ME, kv_scales=b""), ME),
    ):
        greeting.check(mine, theirs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": 77}, "protocol: here 2, at d 77"),
        ({"layers": ["K 64, V 64"]}, "number of layers: here 2, at d 1"),
        ({"layers": ["K 64, V 64"] * 2}, "KV of layer 1: here latent 576, at d K 64, V 64"),
        ({"dtype": "int3"}, "unknown KV dtype 'int3'; supported: float32"),
        ({"kv_scales": bytes.fromhex("0000803f")}, "number of KV scales: here 3, at d 1"),
    ],
)
def test_a_difference_is_refused_by_field_and_both_values(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PeerRefusedError, match=reason):
        greeting.check(ME, replace(ME, node_id="d", **change))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    for message in (garbage, greeting.MAGIC + garbage):
        with pytest.raises(FrameError):
            greeting.decode(message)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 2**64 - 1, "rank": 2**32},
        {"rank": True},
        {"rank": "0"},
        {"node_id": 7},
        {"node_id": "x" * 600},
        {"node_id": "a\nb"},
        {"dtype": None},
        {"layers": None},
        {"layers": "K 64"},
        {"layers": [64]},
        {"layers": ["a\nb"]},
        {"layers": ["x" * 600]},
        {"layers": [["K 64"]]},
        {"layers": ["K 64"] * (greeting.MAX_LAYERS + 1)},
        {"offers": None},
        {"offers": "tcp"},
        {"offers": {"tcp": "text"}},
        {"offers": {"tcp": {}}},
        {"offers": {b"tcp": b""}},
        {"offers": {1: b""}},
        {"offers": {"": b""}},
        {"offers": {"a\nb": b""}},
        {"offers": {"x" * (greeting.MAX_NAME_BYTES + 1): b""}},
        {"offers": {"x": bytes(greeting.MAX_OFFER_BYTES + 1)}},
        {"offers": {str(number): b"" for number in range(greeting.MAX_OFFERS + 1)}},
        {"kv_scales": None},
        {"kv_scales": [1.0]},
        {"kv_scales": b"123"},
        *({"kv_scales": greeting.packed_scales([each])} for each in (0, -1, math.inf, math.nan)),
        {"dtype": msgpack.ExtType(1, b"x")},
        {"dtype": {"a": {}}},
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(change: Any) -> None:
    values = msgpack.unpackb(greeting.encode(ME)[4:]) | change
    with pytest.raises(FrameError):
        greeting.decode(greeting.MAGIC + msgpack.packb(values))


def test_a_greeting_of_another_version_is_understood_by_what_both_know() -> None:
    values = msgpack.unpackb(greeting.encode(ME)[4:])
    del values["offers"], values["full"], values["kv_scales"]
    older_and_newer = values | {"of_a_later_version": "x"}
    without_offers = replace(ME, offers={}, kv_scales=b"")
    assert greeting.decode(greeting.MAGIC + msgpack.packb(older_and_newer)) == without_offers
    del values["dtype"], values["rank"]
    with pytest.raises(FrameError, match="greeting without dtype, rank"):
        greeting.decode(greeting.MAGIC + msgpack.packb(values))
    too_many = {f"field {number}": 0 for number in range(greeting.MAX_FIELDS)}
    with pytest.raises(FrameError, match="max_map_len"):
        greeting.decode(greeting.MAGIC + msgpack.packb(values | too_many))


def test_a_long_greeting_is_refused_unread() -> None:
    with pytest.raises(FrameError, match=f"limit is {greeting.MAX_GREETING_BYTES}"):
        greeting.decode(greeting.encode(ME) + bytes(greeting.MAX_GREETING_BYTES))


def test_a_refusal_in_any_script_fits_into_the_reply() -> None:
    theirs = replace(ME, node_id="界" * 170, protocol=5)
    with pytest.raises(PeerRefusedError) as refusal:
        greeting.check(ME, theirs)
    reply = replace(ME, refused=greeting.refusal_text(refusal.value))
    assert greeting.decode(greeting.encode(reply)).refused.startswith("protocol: here 2, at 界")


def test_ranks_of_unequal_sides_may_meet() -> None:
    half = replace(ME, tp_size=2, rank=1)
    greeting.check(ME, half)
    greeting.check(half, ME)


def test_dtypes_may_differ() -> None:
    greeting.check(ME, replace(ME, dtype="float32"))
