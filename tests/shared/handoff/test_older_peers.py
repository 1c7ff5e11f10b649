"""Peers whose greetings have no offers, as before carriers encoded their own: they use TCP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgpack

from tandem.shared.handoff.plane.messages import (
    Expecting,
    PeerJoined,
    Received,
    ReceiveFailed,
    SendFinished,
)
from tandem.shared.handoff.wire import frame, greeting
from tandem.shared.handoff.wire.frame import Kind
from tandem.shared.handoff.wire.greeting import Greeting

from .fake_peers import FakeReceiver, FakeSender
from .plane_pair import BLOCK, BLOCKS, CELL, END, LAYERS, Rank, expect

# The fields that greetings had for their carriers, and their defaults.
OLDER: dict[str, Any] = {
    "carriers": "tcp",
    "ring_pid": 0,
    "ring_descriptor": 0,
    "ring_bytes": 0,
    "ring_nonce": 0,
    "bell_descriptor": 0,
    "nixl_description": b"",
    "nixl_address": 0,
    "nixl_bytes": 0,
    "device": "",
    "device_handle": b"",
    "device_bytes": 0,
    "device_pid": 0,
    "device_bell": 0,
}
SHORT = {"first_token": 0, "end_token": BLOCK}


def older(sent: Greeting) -> bytes:
    """The greeting of an older rank on this host that may use every carrier, and has a ring."""
    values = asdict(sent) | OLDER
    del values["offers"]
    values |= {"capabilities": 3, "carriers": "cuda_ipc,shared_memory,tcp", "ring_bytes": 4096}
    return greeting.MAGIC + bytes(msgpack.packb(values))


def read_by_older(message: bytes) -> dict[str, Any]:
    """The carriers' fields of a greeting, within the limits of an older version."""
    assert len(message) <= 4096 + (16 << 10)
    values = msgpack.unpackb(
        message[len(greeting.MAGIC) :],
        max_str_len=512,
        max_bin_len=16 << 10,
        max_ext_len=0,
        max_array_len=0,
        max_map_len=64,
    )
    return {name: values.get(name, default) for name, default in OLDER.items()}


def test_an_older_receiver_gets_its_kv_over_tcp() -> None:
    with (
        Rank("p", seed=1, carrier="auto") as prefill,
        FakeReceiver(Rank("d"), prefill, older) as receiver,
    ):
        assert read_by_older(receiver.answer) == OLDER
        assert prefill.log.wait(PeerJoined).carrier == "tcp"
        prefill.open(receiver, 1, BLOCKS, **SHORT)
        prefill.compute(1, 0, BLOCK, chunk=BLOCK)
        pieces = arrived = 0
        while (taken := receiver.take())[0].kind is Kind.DATA:
            pieces, arrived = pieces + 1, arrived + len(taken[1])
        assert taken[0].kind is Kind.FIN and arrived == LAYERS * BLOCK * CELL
        receiver.send(Kind.ACK, 1, frame.ack_payload(arrived), sequence=pieces + 1)
        prefill.log.wait(SendFinished, 1)


def test_an_older_sender_hands_over_by_tcp() -> None:
    with (
        Rank("d", listen_host=None, carrier="auto") as decode,
        FakeSender(Rank("p", seed=1)) as sender,
    ):
        decode.plane.submit(expect(sender, 1, BLOCKS, **SHORT))
        sender.accept(encode=older)
        decode.log.wait(Expecting, 1)
        assert read_by_older(sender.hello) == OLDER
        sent = [sender.data(1, layer, layer, 0, BLOCK) for layer in range(LAYERS)]
        sender.send(*sent, sender.fin(1, sent))
        decode.log.wait(Received, 1)
        assert decode.log.wait(PeerJoined).carrier == "tcp"


def test_a_carrier_by_name_refuses_an_older_peer() -> None:
    with (
        Rank("d", listen_host=None, carrier="shared_memory") as decode,
        FakeSender(Rank("p", seed=1)) as sender,
    ):
        decode.plane.submit(expect(sender, 1, BLOCKS, first_token=0, end_token=END))
        sender.accept(encode=older)
        failed = decode.log.wait(ReceiveFailed, 1)
        assert "carrier: here shared_memory, at p an older version" in failed.reason
        assert not failed.retriable
