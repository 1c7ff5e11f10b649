"""Policies that choose among candidate nodes: pure functions, by name in ``POLICIES``.

Other routers have the same three; prefix-aware is ``cache_aware`` in vLLM's and SGLang's routers,
and ``kv`` in Dynamo.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .place import NodeView, Policy, PromptView, partners

# The prefill rate until any node has measured its own.
ASSUMED_TOKENS_PER_SECOND = 1000.0
# The speed of a link relative to prefill, until it is measured.
LINK_PACES = 10.0
# Fewer tokens take as long to compute, as a step has costs of its own.
STEP_TOKENS = 64
# A running sequence slows others as much as this many tokens to prefill.
SEQUENCE_TOKENS = 256
# Nodes of each kind that are compared in pairs, to keep the cost from growing with the square of
# the cluster.
CONTENDERS = 8


def prefix_aware(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """The lowest estimated time to first token: a held prefix is neither computed nor moved, and
    queued work comes first."""
    costs = _Costs([*decode, *prefill], prompt)
    near = heapq.nsmallest(CONTENDERS, map(costs.of, decode), key=_Cost.alone)
    helpers = {
        group: heapq.nsmallest(
            CONTENDERS, (costs.of(n) for n in prefill if n.group == group), key=_Cost.helping
        )
        for group in {cost.node.group for cost in near}
    }
    best = near[0].with_help(helpers[near[0].node.group])
    for cost in near[1:]:
        if cost.at_best() <= best[:2]:
            best = min(best, cost.with_help(helpers[cost.node.group]))
    decode_cost = best[3]
    order = decode_cost.best_first(helpers[decode_cost.node.group])
    return decode_cost.node, [cost.node for cost in order]


def least_loaded(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """The decode node with the fewest sequences, and prefill nodes by their queues in seconds,
    regardless of prefixes."""
    node = min(decode, key=lambda n: (n.sequences, n.queued_prefill_tokens, prompt.affinity(n)))
    costs = _Costs(prefill, prompt)
    order = sorted(partners(node, prefill), key=lambda n: (costs.queue(n), prompt.affinity(n)))
    return node, order


def round_robin(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """Each node in turn, by name."""
    node = _rotated(decode, prompt.turn)[0]
    return node, _rotated(partners(node, prefill), prompt.turn)


POLICIES: dict[str, Policy] = {
    "prefix-aware": prefix_aware,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
}


def _rotated(nodes: Sequence[NodeView], turn: int) -> list[NodeView]:
    ordered = sorted(nodes, key=lambda node: node.node_id)
    first = turn % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]


class _Costs:
    """Estimates in seconds from measured rates; the mean stands in for unmeasured ones."""

    def __init__(self, nodes: Sequence[NodeView], prompt: PromptView) -> None:
        rates = [n.prefill_tokens_per_second for n in nodes if n.prefill_tokens_per_second]
        self._pace = sum(rates) / len(rates) if rates else ASSUMED_TOKENS_PER_SECOND
        self._prompt = prompt

    def of(self, node: NodeView) -> _Cost:
        return _Cost(node, self._prompt, self._pace)

    def queue(self, node: NodeView) -> float:
        return node.queued_prefill_tokens / (node.prefill_tokens_per_second or self._pace)


class _Cost:
    """The seconds that one node needs for one prompt. Ties are broken by affinity."""

    __slots__ = (
        "_compute",
        "_full",
        "_link",
        "_load",
        "_missing",
        "_prompt",
        "_queue",
        "_step",
        "node",
    )

    def __init__(self, node: NodeView, prompt: PromptView, pace: float) -> None:
        rate = node.prefill_tokens_per_second or pace
        self.node = node
        self._prompt = prompt
        self._link = LINK_PACES * pace
        self._missing = missing = prompt.tokens - node.held_tokens
        # A node without room comes last, since it is unknown when it will have room.
        self._full = node.room_tokens is not None and node.room_tokens < missing
        self._step = STEP_TOKENS / rate
        self._compute = max(missing / rate, self._step)
        self._queue = node.queued_prefill_tokens / rate
        self._load = self._queue + node.sequences * SEQUENCE_TOKENS / rate

    def __lt__(self, other: _Cost) -> bool:
        return self._prompt.affinity(self.node) < self._prompt.affinity(other.node)

    def alone(self) -> Rank:
        """The rank of a decode node that prefills the prompt itself."""
        return self._rank(self._load + self._compute)

    def helping(self) -> Rank:
        """The rank of a prefill node, for any decode node."""
        return self._rank(self._queue + self._compute)

    def at_best(self) -> tuple[bool, float]:
        """The rank of a decode node that has received all of the prompt, or holds it."""
        return self._full, self._load + self._step

    def with_help(self, helpers: Sequence[_Cost]) -> Rank:
        """The rank of a decode node that may also receive the prompt from the best of
        ``helpers``."""
        seconds = self._compute
        if helpers:
            # The last token is computed here in any case: its logits give the first output.
            received = min(map(self._received_from, helpers))[1]
            seconds = min(seconds, received + self._step)
        return self._rank(self._load + seconds)

    def best_first(self, helpers: Sequence[_Cost]) -> list[_Cost]:
        """Prefill nodes by the time at which a decode node would have received the prompt."""
        return sorted(helpers, key=self._received_from)

    def _received_from(self, helper: _Cost) -> Rank:
        link = self.node.link_rates.get(helper.node.node_id) or self._link
        return helper._rank(helper._queue + max(helper._compute, self._missing / link))

    def _rank(self, seconds: float) -> Rank:
        return self._full, seconds, self._missing, self


# A sort key. Ties are broken by the prompt's affinity, which is slow to compute.
Rank = tuple[bool, float, int, _Cost]
