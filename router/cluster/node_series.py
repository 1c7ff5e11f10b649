"""The few series that a router shows of each node; a node shows the rest itself.

Written as text here, because the library takes twenty times as long for a thousand nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ...proto.roles import ROLES, role_name
from .nodes import Node

STATES = ("ready", "draining", "lost", "refused")


class NodeCounts(NamedTuple):
    """What the series show of one node, read at one moment."""

    node_id: str
    role: str
    state: str
    values: tuple[float, ...]


# Name, meaning, and what it is of a node.
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
    ("tandem_node_inflight", "Calls of this router on the node.", lambda node: node.inflight),
)
AGE = "tandem_node_heartbeat_age_seconds"


def snapshot(nodes: Iterable[Node], now: float) -> list[NodeCounts]:
    """The nodes as they are at ``now``, by the clock that their heartbeats are stamped with."""
    return [
        NodeCounts(
            node.node_id,
            role_name(node.role),
            "draining" if node.draining else "ready",
            (*(value(node) for _, _, value in SERIES), round(now - node.last_seen, 3)),
        )
        for node in nodes
    ]


def text(standings: Iterable[NodeCounts], absent: Mapping[tuple[str, str], int]) -> str:
    """The series in Prometheus' text format. ``absent`` are the nodes that should be there and are
    not, by role and state."""
    return "".join(_lines(list(standings), absent))


def _lines(standings: list[NodeCounts], absent: Mapping[tuple[str, str], int]) -> Iterator[str]:
    yield _head("tandem_nodes", "Nodes by role and state.")
    counts = Counter((standing.role, standing.state) for standing in standings)
    counts.update(absent)
    for role in ROLES.values():
        for state in STATES:
            yield f'tandem_nodes{{role="{role}",state="{state}"}} {counts[role, state]}\n'
    labels = [f'node="{_escaped(s.node_id)}",role="{s.role}"' for s in standings]
    yield _head("tandem_node_up", "1 for each node that this router knows, with its state.")
    for label, standing in zip(labels, standings, strict=True):
        yield f'tandem_node_up{{{label},state="{standing.state}"}} 1\n'
    told = [(name, meaning) for name, meaning, _ in SERIES]
    told.append((AGE, "Seconds since the last heartbeat."))
    for number, (name, meaning) in enumerate(told):
        yield _head(name, meaning)
        for label, standing in zip(labels, standings, strict=True):
            yield f"{name}{{{label}}} {standing.values[number]}\n"


def _head(name: str, meaning: str) -> str:
    return f"# HELP {name} {meaning}\n# TYPE {name} gauge\n"


def _escaped(name: str) -> str:
    """As a label's value; a node may have any printable name."""
    return name.replace("\\", r"\\").replace('"', r"\"")
