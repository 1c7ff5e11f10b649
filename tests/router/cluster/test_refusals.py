"""Refused and lost nodes: recorded, counted and logged."""

from __future__ import annotations

import logging

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.absent_nodes import MAX_ABSENT, MAX_REASON, AbsentNodes
from tandem.router.cluster.node_table import NodeTable
from tandem.router.cluster.registry_service import QUIET_SECONDS, Registry
from tandem.router.options import RouterOptions
from tandem.shared.errors import RequestError
from tandem.tests.support.clock import SteppedClock

ADDRESS = "127.0.0.1:9"


class Door:
    """A registry, and its counts."""

    def __init__(self, max_nodes: int = 1) -> None:
        self.clock = SteppedClock()
        self.nodes = NodeTable(3.0, self.clock)
        self.absent = self.nodes.absent
        self._registry = Registry(RouterOptions(max_nodes=max_nodes), self.nodes)

    def fill(self, count: int = 1) -> None:
        for number in range(count):
            join = pb.JoinRequest(node_id=f"n{number}", epoch=1, role=pb.ROLE_PREFILL)
            self.nodes.join(join, ADDRESS)

    async def refuse(
        self, name: str, role: pb.Role = pb.ROLE_PREFILL, address: str = ADDRESS
    ) -> None:
        request = pb.JoinRequest(node_id=name, epoch=1, role=role, address=address)
        with pytest.raises(RequestError):
            await self._registry.enter(request, address)

    def refusals(self, role: str = "prefill") -> float:
        return self.absent.refused.labels(role)._value.get()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


async def test_an_invalid_join_is_recorded_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    door.fill()
    for _ in range(3):
        await door.refuse("b")
        await door.refuse("c", address="x\x1b[2J")
    entries = {node.node_id: node for node in door.absent.all()}
    assert door.absent.tally() == {("prefill", "refused"): 2} and door.refusals() == 6
    assert "at most 1 node" in entries["b"].reason
    assert "must be printable" in entries["c"].reason and entries["c"].address.isprintable()
    messages = warnings(caplog)
    assert len(messages) == 2 and f"node b at {ADDRESS} is refused: this router" in messages[0]


async def test_a_join_without_a_valid_name_is_only_counted_and_seldom_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    for _ in range(2):
        for name in ("", "a\nb", "x" * 300):
            await door.refuse(name)
        await door.refuse("a", role=pb.ROLE_UNSPECIFIED)
    assert not door.absent.all()
    assert (door.refusals(), door.refusals("?")) == (6, 2)
    assert len(warnings(caplog)) == 1
    door.clock.now += QUIET_SECONDS
    await door.refuse("")
    assert len(warnings(caplog)) == 2


async def test_refusals_that_are_too_many_to_remember_are_counted_and_seldom_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    door.fill()
    for _ in range(3):
        for number in range(MAX_ABSENT + 20):
            await door.refuse(f"b{number}")
    assert door.absent.tally() == {("prefill", "refused"): MAX_ABSENT}
    assert door.refusals() == 3 * (MAX_ABSENT + 20)
    assert len(warnings(caplog)) == MAX_ABSENT + 1


def test_all_nodes_may_be_lost_at_once() -> None:
    count = MAX_ABSENT + 300
    door = Door(max_nodes=count)
    door.fill(count)
    door.clock.now += 10
    door.nodes.expire()
    assert len(door.nodes) == 0
    assert door.absent.tally() == {("prefill", "lost"): count}


def test_a_reason_is_bounded_and_an_old_entry_makes_room() -> None:
    clock = SteppedClock()
    absent = AbsentNodes(clock)
    absent.capacity = 1
    absent.add(pb.AbsentNode(node_id="a", role=pb.ROLE_DECODE, reason="x" * 9999))
    assert len(absent.reason("a")) == MAX_REASON
    assert absent.full
    clock.now += 601
    assert not absent.full
