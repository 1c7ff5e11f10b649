"""A node's roles: one at a time, and no request is lost between them."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.proto import tandem_pb2 as pb
from tandem.shared.node.role_switch import RoleSwitch


class SwitchedRole:
    """A role that is busy until ``finish`` is set."""

    def __init__(self, role: pb.Role, *, listens: bool = False) -> None:
        self.role, self.listens = role, listens
        self.admits = True
        self.closed = 0
        self.finish = asyncio.Event()

    def register(self, server: Any, process: Any) -> None: ...

    def background(self) -> list[Any]:
        return [asyncio.sleep(0)]

    def admit(self) -> None:
        self.admits = True

    def drain(self) -> None:
        self.admits = False

    @property
    def busy(self) -> bool:
        return not self.finish.is_set()

    def cut_off(self) -> None:
        self.finish.set()

    async def close(self) -> None:
        self.closed += 1


def pair() -> tuple[SwitchedRole, SwitchedRole, RoleSwitch]:
    decode, prefill = SwitchedRole(pb.ROLE_DECODE), SwitchedRole(pb.ROLE_PREFILL, listens=True)
    prefill.finish.set()
    cast = RoleSwitch([decode, prefill])
    cast.register(None, None)  # type: ignore[arg-type]
    return decode, prefill, cast


async def test_only_the_first_role_takes_work_at_first() -> None:
    decode, prefill, cast = pair()
    assert decode.admits and not prefill.admits
    assert cast.role == pb.ROLE_DECODE and cast.listens and cast.busy
    for loop in cast.background():
        await loop
    assert cast.can_play(pb.ROLE_PREFILL) and not RoleSwitch([decode]).can_play(pb.ROLE_PREFILL)


async def test_the_other_role_begins_when_the_last_request_of_the_old_one_has_ended() -> None:
    decode, prefill, cast = pair()
    change = asyncio.create_task(cast.change(pb.ROLE_PREFILL))
    await asyncio.sleep(0)
    assert not decode.admits and not prefill.admits
    assert cast.role == pb.ROLE_DECODE and not decode.closed
    decode.finish.set()
    await asyncio.wait_for(change, 10)
    assert (cast.role, decode.closed) == (pb.ROLE_PREFILL, 1)
    assert prefill.admits and not decode.admits
    await asyncio.wait_for(cast.change(pb.ROLE_DECODE), 10)
    assert decode.admits and not prefill.admits


async def test_a_node_that_ends_takes_no_new_role() -> None:
    decode, prefill, cast = pair()
    change = asyncio.create_task(cast.change(pb.ROLE_PREFILL))
    await asyncio.sleep(0)
    cast.drain()
    decode.finish.set()
    await asyncio.wait_for(change, 10)
    assert not prefill.admits and not cast.busy
