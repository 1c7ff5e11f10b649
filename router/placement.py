"""Which node gets what: a pure function of a snapshot of the nodes and of the prompt.

Equal prefixes go to the same node while it is not busier than the others, because its prefix index
holds their blocks. Rendezvous hashing finds that node without a table: every router, also one that
has just restarted, comes to the same answer, and a node that leaves moves only its own prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Prompts that share this many leading tokens are taken to share a prefix worth going back to.
AFFINITY_TOKENS = 128
# How many more requests than the least loaded node the node with the prefix may have.
DECODE_SLACK = 4
# How many more seconds of queue than the shortest; without a measured rate, tokens count as below.
PREFILL_SLACK_SECONDS = 0.5
ASSUMED_TOKENS_PER_SECOND = 1000.0
MAX_PREFILL_CANDIDATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What placement knows of a node. ``inflight`` is the router's own count, ahead of ``load``."""

    node_id: str
    epoch: int
    address: str
    prefill: bool
    draining: bool = False
    running: int = 0
    waiting: int = 0
    inflight: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0

    @property
    def requests(self) -> int:
        return max(self.running + self.waiting, self.inflight)

    @property
    def queue_seconds(self) -> float:
        rate = self.prefill_tokens_per_second or ASSUMED_TOKENS_PER_SECOND
        return self.queued_prefill_tokens / rate


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode node, and the prefill nodes that it should try, best first."""

    decode: NodeView
    prefill: tuple[NodeView, ...]


def place(
    nodes: Iterable[NodeView],
    prompt: Sequence[int],
    *,
    salt: str = "",
    exclude: frozenset[tuple[str, int]] = frozenset(),
) -> Placement | None:
    """``None`` when no decode node can take it. ``exclude`` are (id, epoch) that have failed it."""
    usable = [n for n in nodes if not n.draining and (n.node_id, n.epoch) not in exclude]
    decode = [node for node in usable if not node.prefill]
    if not decode:
        return None
    key = _prefix_key(prompt, salt)
    prefill = _order_prefill([node for node in usable if node.prefill], key)
    return Placement(_pick_decode(decode, key), prefill[:MAX_PREFILL_CANDIDATES])


def _pick_decode(nodes: list[NodeView], key: bytes | None) -> NodeView:
    least = min(nodes, key=lambda node: (node.requests, node.node_id))
    home = _home(nodes, key)
    if home is not None and home.requests <= least.requests + DECODE_SLACK:
        return home
    return least


def _order_prefill(nodes: list[NodeView], key: bytes | None) -> tuple[NodeView, ...]:
    ordered = sorted(nodes, key=lambda node: (node.queue_seconds, node.node_id))
    home = _home(ordered, key)
    if home is None or home.queue_seconds > ordered[0].queue_seconds + PREFILL_SLACK_SECONDS:
        return tuple(ordered)
    return (home, *(node for node in ordered if node is not home))


def _prefix_key(prompt: Sequence[int], salt: str) -> bytes | None:
    """Identifies the start of a prompt; short prompts have no home."""
    if len(prompt) < AFFINITY_TOKENS:
        return None
    start = array("Q", prompt[:AFFINITY_TOKENS]).tobytes()
    return hashlib.blake2b(start + salt.encode(), digest_size=16).digest()


def _home(nodes: Sequence[NodeView], key: bytes | None) -> NodeView | None:
    if key is None or not nodes:
        return None
    return max(nodes, key=lambda node: hashlib.blake2b(node.node_id.encode(), key=key).digest())
