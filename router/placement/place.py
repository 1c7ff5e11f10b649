"""Which node gets what: a pure function of a snapshot of the nodes and of the prompt.

How nodes are compared is a policy's (``policies.py``); which may be chosen at all is decided here:
none that drains or has failed this request, and KV passes only between nodes of one group, that is
of one fingerprint.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Prompts that share this many leading tokens are drawn to the same node, all else being equal;
# shorter ones are not worth going back for.
START_TOKENS = 128
MAX_PREFILL_CANDIDATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What placement knows of a node.

    ``ejected``: calls to it failed on the way lately. ``sequences``, running or waiting, and
    ``queued_prefill_tokens`` count this router's own up to now, and others' by the node's last
    report. ``held_tokens`` is how much of the prompt at hand it holds; ``room_tokens`` what its
    free blocks take, ``None`` when it has not said. Rates are in tokens a second, 0 until measured;
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
    """A decode node, and the prefill nodes that it should try, best first."""

    decode: NodeView
    prefill: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class PromptView:
    """What is to be placed. ``start`` is equal for prompts that start alike and are of one tenant,
    and empty for short ones; ``turn`` counts placements."""

    tokens: int
    start: bytes
    turn: int

    def affinity(self, node: NodeView) -> bytes:
        """Rendezvous hashing: the smallest is the home of prompts that start like this one. Every
        router comes to the same answer, also one that has just started."""
        if not self.start:
            return node.node_id.encode()
        return hashlib.blake2b(node.node_id.encode(), key=self.start).digest()


# Decode nodes (one at least), prefill nodes of all groups, the prompt; best prefill node first.
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
    """``None`` when no decode node can take it. ``exclude`` are (id, epoch) that have failed it."""
    usable = [n for n in nodes if not n.draining and (n.node_id, n.epoch) not in exclude]
    decode = [node for node in usable if not node.prefill]
    if not decode:
        return None
    # One that could not be reached lately is better than none.
    decode = [node for node in decode if not node.ejected] or decode
    asked = PromptView(len(prompt), _start(prompt, salt), turn)
    chosen, prefill = policy(decode, [node for node in usable if node.prefill], asked)
    return Placement(chosen, tuple(prefill[:MAX_PREFILL_CANDIDATES]))


def partners(decode: NodeView, prefill: Sequence[NodeView]) -> list[NodeView]:
    """The prefill nodes whose KV a decode node can use."""
    return [node for node in prefill if node.group == decode.group]


def _start(prompt: Sequence[int], salt: str) -> bytes:
    if len(prompt) < START_TOKENS:
        return b""
    tokens = array("Q", prompt[:START_TOKENS]).tobytes()
    return hashlib.blake2b(tokens + salt.encode(), digest_size=16).digest()
