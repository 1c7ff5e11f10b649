"""A cluster with TLS on both sides, a token and CURVE: it serves, and strangers stay outside."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
import zmq

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import DecodeStub, PrefillStub
from tandem.shared.security.credentials import read_credentials
from tandem.tests.end_to_end.support.clients import greedy
from tandem.tests.end_to_end.support.cluster import (
    START_SECONDS,
    Part,
    TestCluster,
    committed_transfers,
    get,
    metric,
    node_metric,
    running,
    tandem,
    until,
)
from tandem.tests.support.certificates import Papers, issue


@dataclass
class Locked:
    cluster: TestCluster
    prefill: Part
    decode: Part
    papers: Papers
    token: Path

    @property
    def flags(self) -> list[str]:
        return [*self.papers.flags, f"--cluster-token-file={self.token}"]

    def serves(self, seed: int, want: list[int]) -> None:
        """Remotely prefilled, with the tokens of an unlocked cluster."""
        assert self.prefills_remotely(seed, want)

    def prefills_remotely(self, seed: int, want: list[int]) -> bool:
        """Send a prompt, which must get its tokens wherever it is prefilled."""
        before = committed_transfers(self.decode)
        assert greedy(self.cluster, seed) == want
        return committed_transfers(self.decode) == before + 1


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    papers, token = issue(folder / "papers", "127.0.0.1"), folder / "token"
    token.write_text("the-token-of-this-cluster\n")
    flags = [*papers.flags, f"--cluster-token-file={token}"]
    with running(folder, tiny_model) as cluster:
        cluster.start_router(*flags)
        node = ["--no-enable-prefix-caching", "--carrier=tcp", *flags]
        prefill, decode = cluster.start_nodes(("prefill-node", *node), ("decode-node", *node))
        cluster.wait_nodes(decode=1, prefill=1)
        yield Locked(cluster, prefill, decode, papers, token)


def _logs(part: Part, words: str) -> bool:
    return words in part.log.read_text()


def test_a_locked_cluster_gives_the_same_tokens(locked: Locked, aggregated: TestCluster) -> None:
    locked.serves(3, greedy(aggregated, 3))


def test_nodes_of_another_model_are_refused_with_a_reason_and_the_cluster_continues(
    locked: Locked, aggregated: TestCluster, tmp_path: Path
) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("of-another-cluster")
    other = issue(tmp_path / "other", "127.0.0.1")
    rejected, foreign, open_ = (
        locked.cluster.launch_node("decode-node", *flags)
        for flags in (
            [*locked.papers.flags, f"--cluster-token-file={wrong}"],
            [*other.flags, f"--cluster-token-file={locked.token}"],
            [],
        )
    )
    for part, words in (
        (rejected, "wrong token: every part of this cluster needs the same --cluster-token"),
        (foreign, "its certificate is not by an authority of --tls-ca"),
        (open_, "it may use TLS, which this side does not (--tls-cert)"),
    ):
        until(partial(_logs, part, words), words, START_SECONDS)
        assert part.log.read_text().count(words) == 1, "told once, though it tries on"
        part.kill()
    assert locked.cluster.router is not None
    assert "refused /tandem.v1.Registry/Join" in locked.cluster.router.log.read_text()
    series = 'tandem_registry_requests_refused_total{reason="wrong token"}'
    assert metric(get(f"{locked.cluster.url}/metrics"), series) >= 1
    locked.cluster.wait_nodes(decode=1, prefill=1)
    locked.serves(4, greedy(aggregated, 4))


def kv_ports(node: Part) -> list[int]:
    """All ports on which the node's ranks listen, as the kernel lists them."""
    import psutil

    (rank,) = psutil.Process(node.process.pid).children()
    return [c.laddr.port for c in rank.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_unknown_connections_to_the_data_plane_are_dropped_and_counted(
    locked: Locked, aggregated: TestCluster
) -> None:
    ports = kv_ports(locked.prefill)
    assert len(ports) == 2
    context, clients = zmq.Context(), []
    try:
        for port in ports:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(random.Random(5).randbytes(1 << 16))
            for curve in (False, True):
                client = context.socket(zmq.DEALER)
                clients.append(client)
                if curve:  # with keys of its own; peers get the server's over the control plane
                    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                    client.curve_serverkey, _ = zmq.curve_keypair()
                client.reconnect_ivl = -1
                client.connect(f"tcp://127.0.0.1:{port}")
                with contextlib.suppress(zmq.Again):  # it has been dropped already
                    client.send(b"let me in", zmq.NOBLOCK)
        series = 'tandem_data_plane_unknown_connections_total{rank="0"}'
        until(
            lambda: node_metric(locked.prefill, series) == 6,
            "six unknown connections to be counted",
        )
    finally:
        for client in clients:
            client.close(0)
        context.term()
    locked.serves(5, greedy(aggregated, 5))


def test_a_call_to_a_node_needs_the_token_too(locked: Locked) -> None:
    credentials = read_credentials(locked.papers.config())
    for part, stub in ((locked.prefill, PrefillStub), (locked.decode, DecodeStub)):
        with (
            credentials.blocking_channel(part.details["address"]) as channel,
            pytest.raises(grpc.RpcError, match="no token: every part of this cluster"),
        ):
            stub(channel).Status(pb.StatusRequest(), timeout=10)
        assert node_metric(part, 'tandem_requests_refused_total{reason="no token"}') == 1


def nodes(locked: Locked, *flags: str) -> subprocess.CompletedProcess[str]:
    assert locked.cluster.router is not None
    registry = f"127.0.0.1:{locked.cluster.router.details['registry']}"
    return tandem("nodes", f"--router={registry}", *flags)


def test_operators_need_the_lock_too(locked: Locked) -> None:
    listing = nodes(locked, *locked.flags)
    assert listing.returncode == 0 and listing.stdout.count(" ready ") == 2
    without = nodes(locked, *locked.papers.flags)
    assert without.returncode == 1 and "tandem: no token: every part" in without.stderr
    outside = nodes(locked)
    assert outside.returncode == 1 and "it may use TLS" in outside.stderr


USED = "changed and are in use now"


def rotate(locked: Locked, change: Callable[[], object]) -> None:
    """Change files, until every part uses them."""
    parts = [part for part in locked.cluster.parts if part.process.poll() is None]
    before = {part.log: part.log.read_text().count(USED) for part in parts}
    change()

    def all_reloaded() -> bool:
        return all(log.read_text().count(USED) > count for log, count in before.items())

    until(all_reloaded, "every part to use the changed files")


def test_everything_is_rotated_while_it_serves(
    locked: Locked, aggregated: TestCluster, tmp_path: Path
) -> None:
    """The last test of this cluster: its papers are others afterwards."""
    papers, new = locked.papers, issue(tmp_path / "new", "127.0.0.1")
    want = greedy(aggregated, 6)
    locked.serves(6, want)
    for tokens in ("the-token-of-this-cluster\nthe-next\n", "the-next\n"):
        rotate(locked, lambda tokens=tokens: locked.token.write_text(tokens))  # type: ignore[misc]
        locked.serves(6, want)

    def replace(old: Path, content: bytes) -> None:
        new_file = tmp_path / "made"
        new_file.write_bytes(content)
        new_file.rename(old)

    def both_authorities() -> None:
        replace(papers.ca, papers.ca.read_bytes() + new.ca.read_bytes())

    def new_certificates() -> None:
        replace(papers.key, new.key.read_bytes())
        replace(papers.cert, new.cert.read_bytes())

    for change in (
        both_authorities,
        new_certificates,
        lambda: replace(papers.ca, new.ca.read_bytes()),
    ):
        rotate(locked, change)
        locked.serves(6, want)
    # Only now is every connection a new one: to a node that has never seen the old papers.
    locked.prefill.kill()
    flags = ["--no-enable-prefix-caching", "--carrier=tcp", *locked.flags]
    (locked.prefill,) = locked.cluster.start_nodes(("prefill-node", *flags))
    locked.cluster.wait_nodes(decode=1, prefill=1)
    # The first greeting of a new node may take longer than a request waits for it.
    until(lambda: locked.prefills_remotely(6, want), "the new node to be used")
    locked.serves(6, want)
    for part in (locked.cluster.router, locked.prefill, locked.decode):
        assert part is not None
        assert "wrong token: every part" not in part.log.read_text().rpartition(USED)[2]
