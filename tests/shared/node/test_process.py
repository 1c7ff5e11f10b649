"""A node's head process: its ports, its end, its drain."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.shared.config import HandoffConfig, NodeConfig
from tandem.shared.engine.start import NodeIdentity
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.handoff.carriers import kinds as carriers
from tandem.shared.node.process import (
    _Description,
    _drain,
    _Shutdown,
    _until,
    with_host,
)
from tandem.shared.node.registration import Registration
from tandem.shared.node.role_switch import RoleSwitch


def test_nixl_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    carriers.check("tcp", insecure=False)
    with pytest.raises(UsageError, match=r"--carrier nixl .* --insecure"):
        carriers.check("nixl", insecure=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(StartupError, match=r"not installed: pip install '\.\[nixl\]'"):
        carriers.check("nixl", insecure=True)


def test_the_data_plane_listens_where_the_control_plane_does_by_default() -> None:
    assert with_host(HandoffConfig(), "0.0.0.0").kv_host == "0.0.0.0"
    assert with_host(HandoffConfig(), "127.0.0.1").kv_host == "127.0.0.1"
    assert with_host(HandoffConfig(kv_host="10.0.0.7"), "0.0.0.0").kv_host == "10.0.0.7"


class WorkingRole:
    """One piece of work that ends when ``finish`` is set."""

    role: pb.Role = pb.ROLE_DECODE
    listens = False

    def __init__(self) -> None:
        self.drained = self.cut = False
        self.finish = asyncio.Event()

    def register(self, server: Any, process: Any) -> None: ...

    def background(self) -> list[Any]:
        return []

    def admit(self) -> None:
        self.drained = False

    def drain(self) -> None:
        self.drained = True

    @property
    def busy(self) -> bool:
        return not self.finish.is_set()

    def cut_off(self) -> None:
        self.cut = True

    async def close(self) -> None: ...


def registration() -> Registration:
    return Registration("127.0.0.1:1", pb.JoinRequest, lambda seconds: None)


async def test_a_drain_refuses_new_work_announces_itself_and_waits_for_the_rest() -> None:
    role, standing = WorkingRole(), registration()
    drain = asyncio.create_task(_drain(RoleSwitch([role]), [standing], _Shutdown()))
    await asyncio.sleep(0)
    assert role.drained and standing.draining and not drain.done()
    role.finish.set()
    await asyncio.wait_for(drain, 10)


async def test_a_drain_that_takes_too_long_ends() -> None:
    role, life = WorkingRole(), _Shutdown()
    life.drain(0.05)
    await asyncio.wait_for(_drain(RoleSwitch([role]), [], life), 10)
    assert role.busy and role.cut


async def test_a_signal_limits_a_drain_that_has_no_limit_and_not_the_reverse() -> None:
    role, life = WorkingRole(), _Shutdown()
    life.drain(None)
    assert life.stop.is_set() and not life.expired
    drain = asyncio.create_task(_drain(RoleSwitch([role]), [], life))
    await asyncio.sleep(0)
    assert not drain.done()
    life.drain(0.0)
    life.drain(None)
    await asyncio.wait_for(drain, 10)
    assert role.busy


async def test_a_node_that_lost_its_ranks_has_nothing_to_wait_for() -> None:
    role, life = WorkingRole(), _Shutdown()
    life.drain(None)
    life.end("rank 0 ended")
    await asyncio.wait_for(_drain(RoleSwitch([role]), [], life), 10)
    assert life.lost == "rank 0 ended"


def test_a_node_can_serve_once_one_of_its_routers_has_it() -> None:
    engine = MagicMock(fingerprint={}, folder="/model", scoring="")
    engine.name, engine.resolved.max_model_len = "m", 8
    engine.spec.vocab_size, engine.spec.eos_token_ids = 9, [0]
    described = _Description(
        RoleSwitch([WorkingRole()]), engine, NodeIdentity("n", 1), MagicMock(), "a:1", NodeConfig()
    )
    assert described.unready() == "starting"
    described.ready = True
    assert not described.unready(), "without --join others ask it"
    first, second = described.registrations = [registration(), registration()]
    first.problem = "rejects this node"
    assert "127.0.0.1:1: rejects this node; router 127.0.0.1:1: it has not" in described.unready()
    second.problem = ""
    assert not described.unready()
    second.problem = "the router cannot reach this node at h:9"
    assert "cannot reach" in described.unready()


async def test_a_node_runs_until_it_is_stopped_even_when_a_loop_has_ended_well() -> None:
    stop = asyncio.Event()
    task = asyncio.create_task(asyncio.sleep(0))
    runs = asyncio.create_task(_until(stop, [task]))
    await task
    await asyncio.sleep(0)
    assert not runs.done()
    stop.set()
    await asyncio.wait_for(runs, 10)


async def test_a_loop_that_fails_ends_the_node_with_its_error() -> None:
    async def fails() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await asyncio.wait_for(_until(asyncio.Event(), [asyncio.create_task(fails())]), 10)
