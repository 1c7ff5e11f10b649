"""Choose the nodes for a prompt: a pure function of the prompt and a snapshot of the nodes.

Policies compare nodes (``policies.py``). This module selects the candidates: nodes that neither
drain nor have failed this request. KV passes only between nodes of one group, which have the same
fingerprint.
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


@dataclass(slots=True, kw_only=True)  # creating a frozen one is three times slower
class NodeView:
    """A node as placement of one prompt sees it; never modified.

    ``ejected``: recent requests did not reach it. ``sequences`` (running or waiting) and
    ``queued_prefill_tokens`` include this router's until now, and others' by the node's last
    report. ``held_tokens`` is the part of the prompt that it holds; ``room_tokens`` is what fits
    into its free blocks, ``None`` if not reported. Rates are in tokens per second, 0 until
    measured; a decode node has ``link_rates`` by prefill node.
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
    """A prompt as policies see it. ``start`` is the same for prompts of a tenant with the same
    beginning, and empty for short ones; ``turn`` counts placements."""

    tokens: int
    start: bytes
    turn: int

    def affinity(self, node: NodeView) -> bytes:
        """A rendezvous hash: the node with the smallest value is the home of prompts with this
        beginning, for every router, also after a restart."""
        if not self.start:
            return node.node_id.encode()
        return hashlib.blake2b(node.node_id.encode(), key=self.start).digest()


# Maps at least one decode node, the prefill nodes of all groups, and the prompt to a decode node
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
    prefill = [node for node in usable if node.prefill]
    decode_node, helpers = policy(decode, prefill, view)
    return Placement(decode_node, tuple(helpers[:MAX_PREFILL_CANDIDATES]))


def partners(decode: NodeView, prefill: Sequence[NodeView]) -> list[NodeView]:
    """The prefill nodes whose KV a decode node can use."""
    return [node for node in prefill if node.group == decode.group]


def _start(prompt: Sequence[int], salt: str) -> bytes:
    if len(prompt) < START_TOKENS:
        return b""
    tokens = array("Q", prompt[:START_TOKENS]).tobytes()
    return hashlib.blake2b(tokens + salt.encode(), digest_size=16).digest()
