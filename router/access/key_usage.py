"""Requests and tokens of each key since the router started, for /v1/usage and for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ..http.access_log import PAGE, AccessRecord
from .api_keys import MAX_KEYS

# Names change with the key file; names over this limit are counted together.
MAX_NAMES = 2 * MAX_KEYS
OTHERS = "(others)"


@dataclass(slots=True)
class KeyCounts:
    """The counts of one key."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)


class KeyUsage(Collector):
    """Counts by the name of the key, which is empty on a router without keys."""

    def __init__(self) -> None:
        self._counts: dict[str, KeyCounts] = {}

    def count(self, access: AccessRecord) -> None:
        """Count a request that has ended, except a monitor's and the page's."""
        if access.is_routine or access.path in PAGE:
            return
        if access.status == 401 and not access.key:
            return
        counts = self.of(access.key)
        counts.requests += 1
        counts.errors += bool(access.error)
        self.count_tokens(access)

    def count_tokens(self, access: AccessRecord) -> None:
        """Count the tokens of a request that is already counted."""
        counts = self.of(access.key)
        counts.prompt_tokens += access.prompt_tokens if access.tokens else 0
        counts.cached_tokens += access.cached_tokens
        counts.completion_tokens += access.output_tokens

    def limited(self, name: str, unit: str) -> None:
        """Count a request that exceeded a limit."""
        self.of(name).limited[unit] += 1

    def of(self, name: str) -> KeyCounts:
        """The counts of a name."""
        if name not in self._counts and len(self._counts) >= MAX_NAMES:
            name = OTHERS
        return self._counts.setdefault(name, KeyCounts())

    def all(self) -> dict[str, KeyCounts]:
        """The counts of every name."""
        return dict(self._counts)

    def collect(self) -> Iterator[CounterMetricFamily]:
        requests = CounterMetricFamily(
            "tandem_key_requests", "Requests by the name of their key.", labels=["key"]
        )
        tokens = CounterMetricFamily(
            "tandem_key_tokens",
            "Tokens by the name of the key: of prompts, of these cached, and generated.",
            labels=["key", "kind"],
        )
        limited = CounterMetricFamily(
            "tandem_key_requests_limited",
            "Requests rejected because of a limit of their key.",
            labels=["key", "limit"],
        )
        # Copies, because the event loop keeps counting while a thread collects.
        for name, counts in tuple(self._counts.items()):
            requests.add_metric([name], counts.requests)
            tokens.add_metric([name, "prompt"], counts.prompt_tokens)
            tokens.add_metric([name, "cached"], counts.cached_tokens)
            tokens.add_metric([name, "generated"], counts.completion_tokens)
            for unit, count in tuple(counts.limited.items()):
                limited.add_metric([name, unit], count)
        yield from (requests, tokens, limited)
