"""The series of each node on the router's metrics page; the node's own page has more.

Formatted as text here: prometheus_client takes twenty times as long for a thousand nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ...proto.roles import ROLES, role_name
from ..cluster.node import Node

STATES = ("ready", "draining", "unreachable", "lost", "refused")


class NodeCounts(NamedTuple):
    """The values of all series for one node at one moment."""

    node_id: str
    role: str
    state: str
    values: tuple[float, ...]


# Name, help text, value of a node.
SERIES: tuple[tuple[str, str, Callable[[Node], float]], ...] = (
    (
        "tandem_node_running",
        "Sequences in the batch, by the last heartbeat.",
        lambda node: node.load.running,
    ),
    (
        "tandem_node_waiting",
        "Sequences not yet running, by the last heartbeat.",
        lambda node: node.load.waiting,
    ),
    (
        "tandem_node_queued_prefill_tokens",
        "Prompt tokens to compute, by the last heartbeat.",
        lambda node: node.load.queued_prefill_tokens,
    ),
    (
        "tandem_node_free_blocks",
        "KV blocks that are free or can be evicted, by the last heartbeat.",
        lambda node: node.load.free_blocks,
    ),
    (
        "tandem_node_total_blocks",
        "KV blocks of the node.",
        lambda node: node.load.total_blocks,
    ),
    (
        "tandem_node_inflight",
        "Requests of this router in progress on the node.",
        lambda node: node.inflight_requests,
    ),
)
AGE = "tandem_node_heartbeat_age_seconds"


def count_nodes(nodes: Iterable[Node], now: float) -> list[NodeCounts]:
    """The values of all nodes at ``now``, on the clock of ``Node.last_seen``."""
    return [
        NodeCounts(
            node.node_id,
            role_name(node.role),
            node.state,
            (*(value(node) for _, _, value in SERIES), round(now - node.last_seen, 3)),
        )
        for node in nodes
    ]


def text(counts: Iterable[NodeCounts], absent: Mapping[tuple[str, str], int]) -> str:
    """The series in Prometheus' text format. ``absent`` has the number of absent nodes by role and
    state."""
    return "".join(_lines(list(counts), absent))


def _lines(nodes: list[NodeCounts], absent: Mapping[tuple[str, str], int]) -> Iterator[str]:
    yield _head("tandem_nodes", "Nodes by role and state.")
    tally = Counter((node.role, node.state) for node in nodes)
    tally.update(absent)
    for role in ROLES.values():
        for state in STATES:
            yield f'tandem_nodes{{role="{role}",state="{state}"}} {tally[role, state]}\n'
    labels = [f'node="{_escaped(node.node_id)}",role="{node.role}"' for node in nodes]
    yield _head("tandem_node_up", "Always 1; the labels have the node's state.")
    for label, node in zip(labels, nodes, strict=True):
        yield f'tandem_node_up{{{label},state="{node.state}"}} 1\n'
    series = [(name, meaning) for name, meaning, _ in SERIES]
    series.append((AGE, "Seconds since the last heartbeat."))
    for number, (name, meaning) in enumerate(series):
        yield _head(name, meaning)
        for label, node in zip(labels, nodes, strict=True):
            yield f"{name}{{{label}}} {node.values[number]}\n"


def _head(name: str, meaning: str) -> str:
    return f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"


def _escaped(name: str) -> str:
    """Escape a label value; a node may have any printable name."""
    return name.replace("\\", r"\\").replace('"', r"\"")
