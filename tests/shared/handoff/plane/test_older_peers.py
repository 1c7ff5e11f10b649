"""Ranks of the protocol before KV had a layout by layer: each side refuses the other by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgpack

from tandem.shared.handoff.plane.messages import ReceiveFailed
from tandem.shared.handoff.wire import greeting
from tandem.shared.handoff.wire.greeting import Greeting
from tandem.tests.shared.handoff.support.fake_peers import FakeReceiver, FakeSender
from tandem.tests.shared.handoff.support.plane_pair import (
    BLOCKS,
    END,
    HEADS,
    LAYERS,
    PlaneRank,
    expect,
)

# The fields that those greetings had and these lack.
OLDER: dict[str, Any] = {
    "num_layers": LAYERS,
    "layer_bytes_per_token": 64,
    "first_head": 0,
    "end_head": HEADS,
    "protocol": 1,
}


def older(sent: Greeting) -> bytes:
    """The greeting of an older rank on this host."""
    values = asdict(sent) | OLDER
    del values["layers"]
    return greeting.MAGIC + bytes(msgpack.packb(values))


def test_an_older_receiver_is_refused_by_name() -> None:
    with (
        PlaneRank("p", seed=1, carrier="auto") as prefill,
        FakeReceiver(PlaneRank("d"), prefill, older) as receiver,
    ):
        assert receiver.welcome.refused == "protocol: here 2, at d 1"


def test_an_older_sender_is_refused_by_name() -> None:
    with (
        PlaneRank("d", listen_host=None, carrier="auto") as decode,
        FakeSender(PlaneRank("p", seed=1)) as sender,
    ):
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        sender.accept(encode=older)
        failed = decode.log.wait(ReceiveFailed, 1)
        assert "protocol: here 2, at p 1" in failed.reason
        assert not failed.retriable
