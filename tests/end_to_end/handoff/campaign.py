"""The cluster that the fault campaign runs on: two prefill and two decode nodes, each behind wires
that a test can break.

A decode node reaches a prefill node through three wires (gRPC, bulk, control), the router a decode
node through one. Prompts are chosen so that they belong to the first node of each pair, which meets
the faults; the second is where a request can go on.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.router.placement.place import NodeView, place
from tandem.router.placement.policies import POLICIES
from tandem.tests.end_to_end.handoff.fault_proxy import DOWN, FaultProxy, Mark, Wire, running_proxy
from tandem.tests.end_to_end.support.baseline import Baseline
from tandem.tests.end_to_end.support.clients import open_request, prompt
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    node_metric,
    pauses,
    running,
)

LENGTH = 480
# Enough for a prompt to be placed by its beginning, and prefilled by another node.
SHORT_LENGTH = 144
OUTPUT = 6
# Of the bytes that a transfer takes on the bulk wire, those that every one takes: how many frames
# the KV is cut into depends on how fast it is computed.
SURE_PART = 0.95
# The smallest, so that a transfer needs many acknowledgements.
WINDOW = 1 << 16
# The goal is 3 s, from the fault to where the request goes on; twice that is a deadline on a slow
# machine, and still far from any time-out that is not for finding faults.
DETECTION_SECONDS = 6.0
# A node that failed several times in a row is left alone for up to half a minute.
RECOVERY_SECONDS = 45.0

# So that a node which failed is soon tried again, for the next case.
SHORT_BACKOFF = "from tandem.shared.process import backoff; backoff.FIRST_PAUSE_SECONDS = 0.1"
# The one by which an idle router of idle nodes sends a prompt to the same ones whatever was before.
POLICY = "least-loaded"
PLACEMENT = f"--placement-policy={POLICY}"
PREFILL_NODES = ("prefill-a", "prefill-b")
DECODE_NODES = ("decode-a", "decode-b")
PREFILL, DECODE = PREFILL_NODES[0], DECODE_NODES[0]
SENT = 'tandem_transfers_total{outcome="done"}'
RECEIVED = 'tandem_transfers_total{outcome="committed"}'


@dataclass(frozen=True, slots=True)
class Wires:
    """The wires to a node. A decode node has no data plane of its own."""

    grpc: Wire
    bulk: Wire
    control: Wire

    def all(self) -> tuple[Wire, Wire, Wire]:
        return self.grpc, self.bulk, self.control


@dataclass(frozen=True, slots=True)
class StreamResult:
    """The tokens that a client received, and when the last arrived. ``error`` is the error
    event, or empty."""

    tokens: list[int]
    error: str
    ended_at: float


class Campaign:
    """The cluster, its wires, and what it was like at rest."""

    def __init__(self, cluster: TestCluster, proxy: FaultProxy, *flags: str) -> None:
        self.cluster = cluster
        self.parts: dict[str, Part] = {}
        self.wires: dict[str, Wires] = {}
        self.baseline: Baseline
        self._whole = 0
        self._proxy = proxy
        self._flags = flags
        self._seeds = itertools.count(1000)

    # ---- processes -----------------------------------------------------------------------------

    def start(self) -> None:
        self.cluster.start_router(PLACEMENT)
        for name in (*PREFILL_NODES, *DECODE_NODES):
            self.wires[name] = Wires(self._proxy.wire(), *self._proxy.two_wires())
            self._launch(name)
        for name in self.parts:
            self._connect(name)
        self.cluster.wait_nodes(decode=2, prefill=2)
        for home in itertools.product(DECODE_NODES, PREFILL_NODES):
            self._connected(*home)
        before = self.wires[PREFILL].bulk.passed()
        self.ask(self.new_prompt())
        self._whole = self.wires[PREFILL].bulk.passed() - before
        self.baseline = Baseline(self.parts, self.cluster.registry)

    def restart(self, name: str) -> None:
        """The node anew, under its name and on its addresses."""
        address = self.parts[name].details["address"]
        self.parts[name].process.wait(20)
        self._launch(name, f"--port={address.rpartition(':')[2]}")
        self._connect(name)

    def signal(self, name: str, number: int) -> None:
        """To the head and its ranks alike, as when a machine dies or stalls."""
        head = psutil.Process(self.parts[name].process.pid)
        for process in (*head.children(recursive=True), head):
            os.kill(process.pid, number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def restart_router(self) -> None:
        old = self.cluster.router
        assert old is not None
        old.process.wait(20)
        self.cluster.start_router(
            PLACEMENT, http=old.details["http"], registry=old.details["registry"]
        )

    def _launch(self, name: str, *flags: str) -> None:
        wires = self.wires[name]
        kind = name.rpartition("-")[0] + "-node"
        data_plane = [
            # Another address than the wires', so that both can have the same ports.
            "--kv-host=127.0.0.2",
            f"--kv-port={wires.bulk.port}",
            f"--kv-advertise=127.0.0.1:{wires.bulk.port}",
        ]
        self.parts[name] = self.cluster.launch_node(
            kind,
            f"--node-id={name}",
            f"--advertise=127.0.0.1:{wires.grpc.port}",
            f"--window-bytes={WINDOW}",
            *(data_plane if name in PREFILL_NODES else ["--no-enable-prefix-caching"]),
            *self._flags,
            *flags,
        )

    def _connect(self, name: str) -> None:
        part, wires = self.parts[name], self.wires[name]
        part.wait_ready()
        host, _, port = part.details["address"].rpartition(":")
        wires.grpc.target = host, int(port)
        wires.bulk.target = "127.0.0.2", wires.bulk.port
        wires.control.target = "127.0.0.2", wires.control.port

    # ---- requests ------------------------------------------------------------------------------

    def new_prompt(
        self, decode: str = DECODE, prefill: str = PREFILL, length: int = LENGTH
    ) -> list[int]:
        """One that no node has seen, and that belongs to these nodes."""
        prompts = (prompt(seed, length) for seed in self._seeds)
        return next(tokens for tokens in prompts if _home(tokens) == (decode, prefill))

    def ask(self, tokens: list[int], count: int = OUTPUT) -> StreamResult:
        return ask(self.cluster, tokens, count)

    def strike(self, fraction: float, action: Callable[[], object]) -> Mark:
        """Run ``action`` when that much of the next transfer from ``PREFILL`` has passed."""
        count = int(fraction * SURE_PART * self._whole)
        return self.wires[PREFILL].bulk.when(DOWN, count, action)

    def heal(self) -> None:
        self._proxy.heal()

    def recover(self) -> None:
        """Wait until a prompt goes from the one node to the other again, and nothing is held."""
        self._connected(DECODE, PREFILL)
        self.baseline.check()

    def _connected(self, decode: str, prefill: str) -> None:
        """Wait until a prompt goes from the one node to the other."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        for pause in pauses():
            before = self._moved(decode, prefill)
            result = self.ask(self.new_prompt(decode, prefill, SHORT_LENGTH))
            moved = zip(self._moved(decode, prefill), before, strict=True)
            if all(now > then for now, then in moved):
                return
            assert time.monotonic() < deadline, f"{prefill} is not used by {decode}: {result}"
            time.sleep(pause)

    def _moved(self, decode: str, prefill: str) -> tuple[float, float]:
        """Transfers that have left the one node, and that have come to the other."""
        return node_metric(self.parts[prefill], SENT), node_metric(self.parts[decode], RECEIVED)


def ask(cluster: TestCluster, tokens: list[int], count: int = OUTPUT) -> StreamResult:
    """Stream the output to its end: that is where a lost request shows first."""
    connection = open_request(
        cluster, tokens, stream=True, max_tokens=count, temperature=0, return_token_ids=True
    )
    try:
        return read_stream(connection.getresponse())
    finally:
        connection.close()


def reference(alone: TestCluster, tokens: list[int], count: int = OUTPUT) -> list[int]:
    """The output of a node that prefills locally; it must never change."""
    body = alone.complete(
        tokens, max_tokens=count, temperature=0, ignore_eos=True, return_token_ids=True
    )
    return list(body["choices"][0]["token_ids"])


def read_stream(response: http.client.HTTPResponse) -> StreamResult:
    """All events, or the refusal. Raises ``IncompleteRead`` for a stream that ends neither well nor
    with its only error: http.client takes one that is cut off between two events for whole."""
    if response.status != 200:
        return StreamResult([], response.read().decode(), time.monotonic())
    lines = [raw.decode().strip() for raw in response]
    lines = [line.removeprefix("data: ") for line in lines if line]
    ended_at = time.monotonic()
    errors = [line for line in lines if '"error"' in line]
    if not lines or lines[-1] != (errors[0] if errors else "[DONE]"):
        raise http.client.IncompleteRead("\n".join(lines).encode())
    assert len(errors) <= 1, errors
    chunks = [json.loads(line) for line in lines[:-1]]
    tokens = [t for chunk in chunks for choice in chunk["choices"] for t in choice["token_ids"]]
    return StreamResult(tokens, errors[0] if errors else "", ended_at)


def _home(tokens: list[int]) -> tuple[str, str]:
    """The nodes that an idle router of these four sends a prompt to."""
    nodes = [
        NodeView(node_id=name, epoch=1, address="", prefill=name in PREFILL_NODES)
        for name in (*PREFILL_NODES, *DECODE_NODES)
    ]
    placement = place(nodes, tokens, POLICIES[POLICY])
    assert placement is not None
    return placement.decode.node_id, placement.prefill[0].node_id


@contextmanager
def running_campaign(folder: Path, model: str, *flags: str) -> Iterator[Campaign]:
    """``flags`` go to every node."""
    with running_proxy() as proxy, running(folder, model) as cluster:
        cluster.prelude = SHORT_BACKOFF
        campaign = Campaign(cluster, proxy, *flags)
        campaign.start()
        try:
            yield campaign
        finally:
            proxy.heal()
