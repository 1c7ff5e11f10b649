"""Choose the nodes for a prompt: a pure function of the prompt and a snapshot of the nodes.

Policies compare nodes (``policies.py``). This module decides which are candidates: none that
drains or has failed this request; and KV passes only between nodes of one group, which have the
same fingerprint.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Prompts that share this many leading tokens go to the same node, all else being equal; shorter
# prefixes are not worth it.
START_TOKENS = 128
MAX_PREFILL_CANDIDATES = 3


@dataclass(slots=True, kw_only=True)  # a frozen one takes three times as long to make
class NodeView:
    """A node as placement of one prompt sees it; never modified.

    ``ejected``: recent requests did not reach it. ``sequences``, running or waiting, and
    ``queued_prefill_tokens`` count this router's up to now, and others' by the node's last report.
    ``held_tokens`` is the part of the prompt that it holds; ``room_tokens`` is what fits into its
    free blocks, ``None`` if not reported. Rates are in tokens a second, 0 until measured;
    ``link_rates`` are a decode node's, by the prefill nodes' names.
    """

    node_id: str
    epoch: int
    address: str
    prefill: bool
    group: str = ""
    draining: bool = False
    ejected: bool = False
    sequences: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    held_tokens: int = 0
    room_tokens: int | None = None
    link_rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode node, and the prefill nodes for it to try, best first."""

    decode: NodeView
    prefill: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt as policies see it. ``start`` is equal for a tenant's prompts that start alike, and
    empty for short ones; ``turn`` counts placements."""

    tokens: int
    start: bytes
    turn: int

    def affinity(self, node: NodeView) -> bytes:
        """A rendezvous hash: the node with the smallest value is the home of prompts that start
        like this one, for every router, including one that has just started."""
        if not self.start:
            return node.node_id.encode()
        return hashlib.blake2b(node.node_id.encode(), key=self.start).digest()


# From at least one decode node, the prefill nodes of all groups, and the prompt, to the decode node
# and its prefill nodes, best first.
Policy = Callable[
    [Sequence[NodeView], Sequence[NodeView], PromptView], tuple[NodeView, Sequence[NodeView]]
]


def place(
    nodes: Iterable[NodeView],
    prompt: Sequence[int],
    policy: Policy,
    *,
    turn: int = 0,
    salt: str = "",
    exclude: frozenset[tuple[str, int]] = frozenset(),
) -> Placement | None:
    """The placement of a prompt; ``None`` if no decode node can take it. ``exclude`` has the (id,
    epoch) of nodes that have failed it."""
    usable = [
        node
        for node in nodes
        if not node.draining and not (exclude and (node.node_id, node.epoch) in exclude)
    ]
    decode = [node for node in usable if not node.prefill]
    if not decode:
        return None
    # An ejected node is better than none.
    decode = [node for node in decode if not node.ejected] or decode
    view = PromptView(len(prompt), _start(prompt, salt), turn)
    chosen, prefill = policy(decode, [node for node in usable if node.prefill], view)
    return Placement(chosen, tuple(prefill[:MAX_PREFILL_CANDIDATES]))


def partners(decode: NodeView, prefill: Sequence[NodeView]) -> list[NodeView]:
    """The prefill nodes whose KV a decode node can use."""
    return [node for node in prefill if node.group == decode.group]


def _start(prompt: Sequence[int], salt: str) -> bytes:
    if len(prompt) < START_TOKENS:
        return b""
    tokens = array("Q", prompt[:START_TOKENS]).tobytes()
    return hashlib.blake2b(tokens + salt.encode(), digest_size=16).digest()
