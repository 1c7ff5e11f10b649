"""Prefixes of lost nodes, retained for a while so that a returning node need not resend them."""

from __future__ import annotations

from collections.abc import Callable

from ..placement.node_prefixes import NodePrefixes

RETAINED_SECONDS = 300.0
MAX_RETAINED = 1024

NodeKey = tuple[str, int]  # id and epoch


class RetainedPrefixes:
    """The prefixes of at most ``MAX_RETAINED`` nodes; the oldest are dropped first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # with the time at which each expires
        self._retained: dict[NodeKey, tuple[float, NodePrefixes]] = {}

    def retain(self, key: NodeKey, prefixes: NodePrefixes) -> None:
        self._retained[key] = self._clock() + RETAINED_SECONDS, prefixes
        if len(self._retained) > MAX_RETAINED:
            self._drop(next(iter(self._retained)))

    def take(self, key: NodeKey) -> NodePrefixes | None:
        """Remove and return the prefixes of a node that has returned; ``None`` without any."""
        return self._retained.pop(key, (0.0, None))[1]

    def expire(self) -> None:
        now = self._clock()
        for key in [key for key, (until, _) in self._retained.items() if until < now]:
            self._drop(key)

    def _drop(self, key: NodeKey) -> None:
        self._retained.pop(key)[1].hide()
