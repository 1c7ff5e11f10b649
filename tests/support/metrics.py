"""The metrics registries of every kind of process, without the processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.proto import tandem_pb2 as pb
from tandem.router.access.key_usage import KeyUsage
from tandem.router.cluster.node_table import NodeTable
from tandem.router.telemetry.metrics import Metrics
from tandem.router.telemetry.node_series import count_nodes, text
from tandem.shared.handoff.plane.stats import DataPlaneStats
from tandem.shared.security.credentials import INSECURE, Credentials
from tandem.shared.security.token_interceptor import TokenInterceptor
from tandem.shared.telemetry.process_metrics import ProcessMetrics
from tandem.tests.support.fake_node import FakeNode

ROUTER, NODE, PROCESS = "router", "node", "process"


class Expiring(Credentials):
    """Credentials with one certificate."""

    def expiries(self) -> dict[str, float]:
        return {"--tls-cert": 1.0}


def registries() -> Iterator[tuple[str, CollectorRegistry, set[str]]]:
    """The kind of process, its registry, and the labels that its page adds."""
    router = Metrics(NodeTable(1.0))
    router.add(TokenInterceptor(INSECURE, "tandem_registry_requests_refused").refused)
    router.vllm.cache_config.blocks = {16: 512}
    keys = KeyUsage()
    keys.limited("alice", "requests")
    router.add(keys)
    yield ROUTER, router.registry, set()
    node = FakeNode("d", 1)
    node.ranks.inbox.stats[0] = DataPlaneStats()
    node.metrics.registry.register(TokenInterceptor(INSECURE, "tandem_requests_refused").refused)
    yield NODE, node.metrics.registry, {"node"}
    process = CollectorRegistry()
    ProcessMetrics(process, Expiring())
    yield PROCESS, process, set()


def families_of_nodes() -> Iterator[Metric]:
    """The router's series of its nodes, which it writes without a registry."""
    nodes = NodeTable(1.0)
    nodes.join(pb.JoinRequest(node_id="d", role=pb.ROLE_DECODE), "127.0.0.1:1")
    yield from text_string_to_metric_families(text(count_nodes(nodes, nodes.now()), Counter()))
