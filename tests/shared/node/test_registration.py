"""A node's registration with a router: a registry in this process, and no engine."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server
from tandem.shared.node import registration
from tandem.shared.node.registration import Registration


@pytest.fixture(autouse=True)
def brief_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "FIRST_RETRY_SECONDS", 0.02)


class FakeRegistry(RegistryServicer):
    """Records RPCs. ``refuse`` rejects joins with a status."""

    def __init__(self) -> None:
        self.joins: list[pb.JoinRequest] = []
        self.beats: list[pb.HeartbeatRequest] = []
        self.leaves: list[pb.LeaveRequest] = []
        self.known = True
        self.drain = False
        self.drain_seconds: float | None = None
        self.role: pb.Role = pb.ROLE_UNSPECIFIED
        self.prefix_version = 0  # in replies to heartbeats
        self.known_version = 0  # in replies to joins
        self.fail_beats: grpc.StatusCode | None = None
        self.heartbeat_seconds = 0.01
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.unreachable = ""
        self.changed = asyncio.Event()

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        self.joins.append(request)
        self.changed.set()
        if self.refuse is not None:
            await context.abort(*self.refuse)
        self.known = True
        return pb.JoinReply(
            router_epoch=1,
            heartbeat_seconds=self.heartbeat_seconds,
            prefix_version=self.known_version,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        self.beats.append(request)
        self.changed.set()
        if self.fail_beats is not None:
            await context.abort(self.fail_beats, "a test")
        return pb.HeartbeatReply(
            known=self.known,
            drain=self.drain,
            drain_seconds=self.drain_seconds,
            role=self.role,
            prefix_version=self.prefix_version,
            unreachable=self.unreachable,
        )

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        self.leaves.append(request)
        return pb.LeaveReply()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def serving(
    registry: FakeRegistry, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_RegistryServicer_to_server(registry, server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


class RegisteredNode:
    """The node of a registration; its load changes with every description."""

    def __init__(self) -> None:
        self.drains: list[float | None] = []
        self.role: pb.Role = pb.ROLE_DECODE
        self.descriptions = 0
        self.broken = False
        self.known_versions: list[int] = []
        self.rates: dict[str, float] = {}

    def describe(self) -> pb.JoinRequest:
        if self.broken:
            self.broken = False
            raise ValueError("value out of range")
        self.descriptions += 1
        rates = [pb.LinkRate(node_id=n, tokens_per_second=r) for n, r in self.rates.items()]
        load = pb.Load(running=self.descriptions, link_rates=rates)
        return pb.JoinRequest(node_id="n", epoch=7, role=self.role, load=load)

    def prefixes(self, version: int) -> pb.Prefixes:
        self.known_versions.append(version)
        return pb.Prefixes(version=5, base=version)

    def drain(self, seconds: float | None) -> None:
        self.drains.append(seconds)

    def play(self, role: pb.Role) -> None:
        self.role = role

    def register(self, port: int, host: str = "127.0.0.1", **more: Any) -> Registration:
        return Registration(
            f"{host}:{port}",
            self.describe,
            self.drain,
            prefixes=self.prefixes,
            on_role=self.play,
            **more,
        )


@asynccontextmanager
async def registered(registration: Registration) -> AsyncIterator[None]:
    task = asyncio.create_task(registration.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_node_joins_beats_with_fresh_load_and_leaves() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: len(registry.beats) >= 3)
            assert not registration.problem
        assert [join.node_id for join in registry.joins] == ["n"]
        loads = [beat.load.running for beat in registry.beats]
        assert loads == sorted(set(loads))
        beat = registry.beats[0]
        assert (beat.node_id, beat.epoch, beat.draining) == ("n", 7, False)
        assert [(leave.node_id, leave.epoch) for leave in registry.leaves] == [("n", 7)]


async def test_heartbeats_report_that_the_node_drains() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: bool(registry.beats))
            registration.draining = True
            await registry.until(lambda: registry.beats[-1].draining)


async def test_a_draining_node_that_joins_again_announces_it_at_once() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    registry.heartbeat_seconds = 3600.0
    async with serving(registry) as port:
        registration = node.register(port)
        registration.draining = True
        async with registered(registration):
            await registry.until(lambda: bool(registry.beats))
            assert registry.beats[0].draining


async def test_an_operator_can_have_the_node_drain_and_then_lose_patience() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: bool(registry.beats))
            assert node.drains == []
            for seconds in (None, 2.5):
                registry.drain, registry.drain_seconds = True, seconds
                count = len(registry.beats)
                await registry.until(lambda count=count: len(registry.beats) > count + 2)  # type: ignore[misc]
                registration.draining = True
            assert node.drains == [None, 2.5]


async def test_a_node_joins_again_in_its_new_role() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: bool(registry.beats))
        registry.role = pb.ROLE_PREFILL
        await registry.until(lambda: len(registry.joins) == 2)
        assert [join.role for join in registry.joins] == [pb.ROLE_DECODE, pb.ROLE_PREFILL]
        assert not registry.leaves
        count = len(registry.beats)
        await registry.until(lambda: len(registry.beats) > count + 2)
        assert len(registry.joins) == 2


@pytest.mark.parametrize("version", [0, 4])
async def test_heartbeats_carry_the_prefixes_that_the_router_lacks(version: int) -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    registry.known_version, registry.prefix_version = version, 3
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: len(registry.beats) >= 2)
        assert node.known_versions[:2] == [version, 3]
        assert not registry.joins[0].HasField("prefixes")
        assert [beat.prefixes.base for beat in registry.beats[:2]] == [version, 3]


async def test_a_lost_heartbeat_is_sent_again_without_a_join() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    registry.prefix_version = 3
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: len(registry.beats) >= 2)
            registry.fail_beats = grpc.StatusCode.DEADLINE_EXCEEDED
            await registry.until(lambda: bool(registration.problem))
            registry.fail_beats = None
            count = len(registry.beats)
            await registry.until(lambda: len(registry.beats) >= count + 2)
            assert not registration.problem
    assert len(registry.joins) == 1
    assert {beat.prefixes.base for beat in registry.beats[1:]} == {3}


async def test_a_heartbeat_at_rest_is_small_however_many_links_were_measured() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    node.rates = {f"prefill-node-{number}.svc.cluster.local": 1e5 for number in range(400)}
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: len(registry.beats) >= 2)
        assert len(registry.joins[0].load.link_rates) == 400
        assert all(beat.ByteSize() <= 600 for beat in registry.beats)
        assert not any(beat.load.link_rates for beat in registry.beats)


async def test_changed_link_rates_are_reported_a_few_at_a_time() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    node.rates = {f"p{number:02}": 1e5 for number in range(40)}
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: len(registry.beats) >= 1)
        del registry.beats[:]
        node.rates = {name: 3e5 for name in node.rates if name != "p07"} | {
            "new": 1e4,
            "p00": 1.1e5,
        }
        rates: dict[str, float] = {}

        def learned() -> bool:
            for beat in registry.beats:
                assert len(beat.load.link_rates) <= 8
                rates.update({r.node_id: r.tokens_per_second for r in beat.load.link_rates})
            return len(rates) == 40

        await registry.until(learned)
        assert rates["p07"] == 0 and rates["new"] == 1e4 and "p00" not in rates
        await registry.until(lambda: not registry.beats[-1].load.link_rates)


async def test_a_node_that_the_router_forgot_joins_again() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: bool(registry.beats))
        registry.known = False
        await registry.until(lambda: len(registry.joins) == 2 and registry.known)
        count = len(registry.beats)
        await registry.until(lambda: len(registry.beats) > count)


async def test_a_router_that_is_not_there_yet_or_restarts_is_found() -> None:
    first, second, node = FakeRegistry(), FakeRegistry(), RegisteredNode()
    async with serving(first) as port:
        pass  # a port without a listener
    registration = node.register(port)
    async with registered(registration):
        async with serving(first, port):
            await first.until(lambda: bool(first.beats))
        async with serving(second, port):
            await second.until(lambda: bool(second.beats) and not registration.problem)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "rejects this node, which will retry: layers is 2"),
        (grpc.StatusCode.INVALID_ARGUMENT, "rejects this node, which will retry: layers is 2"),
        (grpc.StatusCode.UNAUTHENTICATED, "rejects this node, which will retry: layers is 2"),
        (grpc.StatusCode.ABORTED, "rejects this node, which will retry: layers is 2"),
        (grpc.StatusCode.UNAVAILABLE, "does not answer: layers is 2"),
    ],
)
async def test_a_refused_node_retries_until_it_is_accepted(
    code: grpc.StatusCode, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    registry.refuse = code, "layers is 2"
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: len(registry.joins) >= 3)
            assert registration.problem == words
            warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
            assert warnings == [f"router 127.0.0.1:{port} {words}"]
            registry.refuse = None
            await registry.until(lambda: bool(registry.beats))
            assert not registration.problem


async def test_another_reason_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    registry.refuse = grpc.StatusCode.UNAUTHENTICATED, "no token"
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: len(registry.joins) >= 2)
        registry.refuse = grpc.StatusCode.FAILED_PRECONDITION, "another model"
        count = len(registry.joins)
        await registry.until(lambda: len(registry.joins) >= count + 3)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [line.rpartition(": ")[2] for line in warnings] == ["no token", "another model"]


async def test_a_bug_in_the_description_is_logged_and_does_not_end_the_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    node.broken = True
    async with serving(registry) as port, registered(node.register(port)):
        await registry.until(lambda: bool(registry.beats))
    assert "value out of range" in caplog.text


async def test_a_node_that_fails_says_so_when_it_leaves() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        async with registered(node.register(port, failure=lambda: "rank 0 ended")):
            await registry.until(lambda: bool(registry.beats))
        assert [leave.failure for leave in registry.leaves] == ["rank 0 ended"]


async def test_each_router_gets_the_address_on_the_route_to_it() -> None:
    registry, node, at = FakeRegistry(), RegisteredNode(), ["10.0.0.7:1"]

    async def announce() -> str:
        return at[0]

    async with serving(registry) as port, registered(node.register(port, announce=announce)):
        await registry.until(lambda: len(registry.beats) > 1)
        at[0] = "10.0.0.8:1"
        count = len(registry.beats)
        await registry.until(lambda: len(registry.beats) > count + 2)
        assert len(registry.joins) == 1, "as long as the router can call it"
        registry.unreachable = "no answer"
        await registry.until(lambda: len(registry.joins) > 1)
    assert [join.address for join in registry.joins[:2]] == ["10.0.0.7:1", "10.0.0.8:1"]


async def test_a_node_without_an_address_for_a_router_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, node, lookups = FakeRegistry(), RegisteredNode(), 0

    async def announce() -> str:
        nonlocal lookups
        lookups += 1
        if lookups < 4:
            raise OSError("router.test does not resolve: Name or service not known")
        return "10.0.0.7:1"

    async with serving(registry) as port:
        registration = node.register(port, announce=announce)
        async with registered(registration):
            await registry.until(lambda: bool(registry.beats))
            assert not registration.problem
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot be joined: router.test does not resolve" in warnings[0]


async def test_a_node_that_its_router_cannot_call_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        registration = node.register(port)
        async with registered(registration):
            await registry.until(lambda: bool(registry.beats))
            registry.unreachable = "the router cannot reach this node at h:1"
            await registry.until(lambda: registration.problem == registry.unreachable)
            count = len(registry.beats)
            await registry.until(lambda: len(registry.beats) > count + 2)
            registry.unreachable = ""
            await registry.until(lambda: not registration.problem)
    warnings = [
        r.getMessage() for r in caplog.records if f"router 127.0.0.1:{port}" in r.getMessage()
    ]
    assert [line.partition(f":{port}")[2] for line in warnings] == [
        "",
        " has this node, but: the router cannot reach this node at h:1",
        " has this node and can reach it again",
    ]
    assert len(registry.joins) == 1


def test_a_router_that_returns_at_another_address_is_found_by_its_name(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a namespace of mounts, so root")
    program = "tandem.tests.shared.node.moved_router"
    command = ["unshare", "-m", sys.executable, "-m", program, str(hosts)]
    subprocess.run(command, check=True, timeout=60)


async def test_leaving_a_router_that_is_gone_is_no_error() -> None:
    registry, node = FakeRegistry(), RegisteredNode()
    async with serving(registry) as port:
        task = asyncio.create_task(node.register(port).run())
        await registry.until(lambda: bool(registry.beats))
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError)
    assert registry.leaves == []
