"""Policies, which choose among candidate nodes: pure functions, by name in ``POLICIES``.

Others have the same three: vLLM's and SGLang's routers call the first ``cache_aware``, Dynamo calls
it ``kv``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

from .place import NodeView, Policy, PromptView, partners

# The prefill rate until any node has measured its own.
ASSUMED_TOKENS_PER_SECOND = 1000.0
# How much faster KV moves than it is computed, until a link is measured.
LINK_PACES = 10.0
# A running sequence slows others as much as this many tokens to prefill.
SEQUENCE_TOKENS = 256
# Nodes of each kind that are compared as pairs: the cost must not grow with the cluster's square.
CONTENDERS = 8


def prefix_aware(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """The lowest estimated time to first token: a held prefix need not be computed or moved, and
    queued work comes first."""
    costs = _Costs([*decode, *prefill], prompt)
    near = heapq.nsmallest(CONTENDERS, decode, key=costs.alone)
    of_each_group = {node.group: node for node in near}
    helpers = {
        group: heapq.nsmallest(CONTENDERS, partners(node, prefill), key=costs.helping)
        for group, node in of_each_group.items()
    }
    pairs = {node.node_id: costs.best_first(node, helpers[node.group]) for node in near}
    chosen = min(near, key=lambda node: costs.with_help(node, pairs[node.node_id]))
    return chosen, pairs[chosen.node_id]


def least_loaded(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """The decode node with the fewest sequences, and prefill nodes by their queues in seconds,
    regardless of prefixes."""
    chosen = min(decode, key=lambda n: (n.sequences, n.queued_prefill_tokens, prompt.affinity(n)))
    costs = _Costs(prefill, prompt)
    order = sorted(partners(chosen, prefill), key=lambda n: (costs.queue(n), prompt.affinity(n)))
    return chosen, order


def round_robin(
    decode: Sequence[NodeView], prefill: Sequence[NodeView], prompt: PromptView
) -> tuple[NodeView, Sequence[NodeView]]:
    """Each node in turn, by name."""
    chosen = _rotated(decode, prompt.turn)[0]
    return chosen, _rotated(partners(chosen, prefill), prompt.turn)


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
    """Estimates in seconds from measured rates; a mean replaces those not measured yet."""

    def __init__(self, nodes: Sequence[NodeView], prompt: PromptView) -> None:
        rates = [n.prefill_tokens_per_second for n in nodes if n.prefill_tokens_per_second]
        self._pace = fmean(rates) if rates else ASSUMED_TOKENS_PER_SECOND
        self._prompt = prompt

    def queue(self, node: NodeView) -> float:
        return node.queued_prefill_tokens / self._rate(node)

    def alone(self, node: NodeView) -> tuple[bool, float, int, bytes]:
        """The cost of a decode node that prefills the prompt itself."""
        return self._total(node, self._compute(node))

    def helping(self, node: NodeView) -> tuple[bool, float, int, bytes]:
        """The cost of a prefill node, for any decode node."""
        return self._ranked(node, self.queue(node) + self._compute(node))

    def with_help(
        self, node: NodeView, helpers: Sequence[NodeView]
    ) -> tuple[bool, float, int, bytes]:
        """The cost of a decode node that may also receive the prompt from ``helpers[0]``."""
        ways = [self._compute(node), *(self._remote(node, helper) for helper in helpers[:1])]
        return self._total(node, min(ways))

    def best_first(self, node: NodeView, helpers: Sequence[NodeView]) -> list[NodeView]:
        """Prefill nodes by how soon a decode node would have received the prompt from them."""
        return sorted(helpers, key=lambda p: self._ranked(p, self._remote(node, p)))

    def _total(self, node: NodeView, prefill_seconds: float) -> tuple[bool, float, int, bytes]:
        load = self.queue(node) + node.sequences * SEQUENCE_TOKENS / self._rate(node)
        return self._ranked(node, load + prefill_seconds)

    def _ranked(self, node: NodeView, seconds: float) -> tuple[bool, float, int, bytes]:
        """A sort key in which a node without room comes last: when it will have room is unknown."""
        missing = self._missing(node)
        full = node.room_tokens is not None and node.room_tokens < missing
        return full, seconds, missing, self._prompt.affinity(node)

    def _remote(self, decode: NodeView, prefill: NodeView) -> float:
        link = decode.link_rates.get(prefill.node_id) or LINK_PACES * self._pace
        moving = self._missing(decode) / link
        return self.queue(prefill) + max(self._compute(prefill), moving)

    def _compute(self, node: NodeView) -> float:
        return self._missing(node) / self._rate(node)

    def _missing(self, node: NodeView) -> int:
        return self._prompt.tokens - node.held_tokens

    def _rate(self, node: NodeView) -> float:
        return node.prefill_tokens_per_second or self._pace
