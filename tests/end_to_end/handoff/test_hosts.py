"""Router, prefill node and decode node on machines of their own, over a network that loses, delays
and cuts."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.router.cluster import admin
from tandem.router.doctor.findings import findings
from tandem.router.doctor.survey import survey
from tandem.tests.end_to_end.handoff import hosts
from tandem.tests.end_to_end.handoff.campaign import (
    DETECTION_SECONDS,
    LENGTH,
    RECEIVED,
    RECOVERY_SECONDS,
    ask,
    reference,
)
from tandem.tests.end_to_end.handoff.hosts import Switch, three_hosts
from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    CHUNK,
    CONTEXT,
    START_SECONDS,
    Part,
    TestCluster,
    get,
    node_metric,
    running,
    until,
)

PROBLEM = hosts.problem()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)

ROUTER, PREFILL, DECODE = (f"{hosts.NETWORK}{number}" for number in (1, 2, 3))


class Machines:
    """The three parts, and the network between them."""

    def __init__(
        self, cluster: TestCluster, switch: Switch, on: dict[str, str], model: str
    ) -> None:
        self.cluster, self.switch, self.on, self.model = cluster, switch, on, model
        self.nodes: list[Part] = []

    @property
    def decode(self) -> Part:
        return self.nodes[1]

    def start_router(self) -> None:
        addresses = [f"--host={ROUTER}", f"--registry-host={ROUTER}"]
        ports = ["--port=8000", "--registry-port=8001", "--insecure"]
        command = ["router", *addresses, *ports]
        self.cluster.router = self.cluster.launch(command, ROUTER, prelude=self.on[ROUTER])
        self.cluster.router.wait_ready()

    def unready(self, url: str) -> str:
        """Why a probe says no; empty if it says yes."""
        try:
            get(url)
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()
        return ""

    def check(self, seed: int, alone: TestCluster) -> float:
        """Request tokens and compare them; returns the time at which the response ended."""
        tokens = prompt(seed, LENGTH)
        result = ask(self.cluster, tokens)
        assert (result.tokens, result.error) == (reference(alone, tokens), "")
        return result.ended_at

    def transfers(self, seed: int) -> bool:
        """True if a prompt goes through the prefill node now."""
        before = node_metric(self.decode, RECEIVED)
        ask(self.cluster, prompt(seed, LENGTH))
        return node_metric(self.decode, RECEIVED) > before


@contextmanager
def running_machines(folder: Path, model: str) -> Iterator[Machines]:
    with three_hosts() as (switch, on), running(folder, model) as cluster:
        machines = Machines(cluster, switch, on, model)
        machines.start_router()
        for kind, host in (("prefill-node", PREFILL), ("decode-node", DECODE)):
            # Each announces the address by which it reaches the router.
            flags = ["--host=0.0.0.0", f"--join={ROUTER}:8001", "--insecure", "--carrier=tcp"]
            flags += ["--dtype=float32", "--threads=1", f"--block-size={BLOCK}"]
            flags += [f"--max-model-len={CONTEXT}", f"--max-num-batched-tokens={CHUNK}"]
            flags += ["--prefill-threshold=1", "--no-enable-prefix-caching"]
            machines.nodes.append(cluster.launch([kind, model, *flags], host, prelude=on[host]))
        for node in machines.nodes:
            node.wait_ready()
        cluster.wait_nodes(decode=1, prefill=1)
        yield machines


@pytest.fixture(scope="module")
def machines(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, aggregated: TestCluster
) -> Iterator[Machines]:
    with running_machines(tmp_path_factory.mktemp("hosts"), tiny_model) as machines:
        machines.check(1, aggregated)
        yield machines


@pytest.fixture(autouse=True)
def healed(machines: Machines) -> Iterator[None]:
    yield
    machines.switch.heal()
    until(lambda: machines.transfers(0), "the nodes to hand over again", RECOVERY_SECONDS)
    machines.cluster.wait_idle(*machines.nodes)


def test_nodes_announce_the_address_by_which_they_reach_the_router(machines: Machines) -> None:
    nodes = admin.list_nodes(f"{ROUTER}:8001").nodes
    assert [node.address.partition(":")[0] for node in nodes] == [PREFILL, DECODE]


def test_a_node_that_its_router_could_never_call_does_not_start(machines: Machines) -> None:
    command = ["decode-node", machines.model, f"--join={ROUTER}:8001"]
    node = machines.cluster.launch(command, DECODE, prelude=machines.on[DECODE])
    assert node.process.wait(START_SECONDS) == 2
    log = node.log.read_text()
    assert "--host 127.0.0.1 is open to this machine only" in log
    assert f"--host {DECODE}" in log and "--advertise" in log


def test_a_node_behind_a_firewall_is_not_ready_until_it_can_be_called(machines: Machines) -> None:
    router, node = f"http://{ROUTER}:8000/ready", machines.decode
    probe = f"http://{node.host}:{node.health_port()}/ready"
    machines.switch.closed.add((ROUTER, DECODE))
    assert machines.cluster.router is not None
    machines.cluster.router.kill()
    machines.start_router()
    until(lambda: "cannot reach this node" in machines.unready(probe), "the node to know")
    assert "no answer within 2 s" in machines.unready(probe)
    machines.cluster.wait_nodes(decode=0, prefill=1)
    assert machines.unready(router)
    machines.switch.heal()
    until(lambda: not machines.unready(probe), "the node to be called", RECOVERY_SECONDS)
    assert not machines.unready(router)
    log = node.log.read_text()
    assert log.count("the router cannot reach this node") == 1
    machines.cluster.wait_nodes(decode=1, prefill=1)


def test_a_network_of_50_ms_carries_transfers(machines: Machines, aggregated: TestCluster) -> None:
    machines.switch.delay = 0.05
    machines.check(2, aggregated)
    assert machines.transfers(3)


def test_a_link_of_a_megabyte_a_second_carries_transfers(
    machines: Machines, aggregated: TestCluster
) -> None:
    """As between two homes: slow, far, and with a queue that overflows."""
    machines.switch.rate, machines.switch.delay = 1e6, 0.01
    for seed in range(3):
        machines.check(700 + seed, aggregated)
    assert machines.transfers(703)


def test_a_network_that_loses_a_twentieth_gives_the_same_tokens(
    machines: Machines, aggregated: TestCluster
) -> None:
    machines.switch.loss = 0.05
    for seed in range(10, 14):
        machines.check(seed, aggregated)


def test_the_doctor_sees_a_path_that_loses_large_packets_and_its_repair(machines: Machines) -> None:
    router = f"http://{ROUTER}:8000"
    pair = frozenset((PREFILL, DECODE))
    machines.switch.narrow[pair] = 600
    assert not machines.transfers(30), "and the decode node backs off from the other"
    [wrong] = [finding for finding in findings(survey(router, f"{ROUTER}:8001")) if finding.wrong]
    assert "KV cannot move" in wrong.problem and "not called" not in wrong.problem
    assert "compare the MTU" in wrong.remedy
    machines.switch.heal()
    assert not [finding for finding in findings(survey(router, f"{ROUTER}:8001")) if finding.wrong]
    assert machines.transfers(31), "the doctor has ended the pause"


@pytest.mark.parametrize("count", [0, 200_000])
def test_a_cut_between_the_nodes_costs_seconds(
    machines: Machines, aggregated: TestCluster, count: int
) -> None:
    cut_at: list[float] = []

    def cut() -> None:
        cut_at.append(time.monotonic())
        machines.switch.cut.add(frozenset((PREFILL, DECODE)))

    machines.switch.when(PREFILL, DECODE, count, cut)
    ended_at = machines.check(20 + count, aggregated)
    assert ended_at - cut_at[0] < DETECTION_SECONDS
