"""Bounds on what the SDK validates in a server's message.

It validates in C, which blocks all threads of the router: a megabyte of invalid blocks takes 6 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Items in all lists of one message, such as content blocks and tools; validating one takes up to 20
# us. Further items are dropped.
MAX_ITEMS = 768
# Fields that are not validated.
OPAQUE = frozenset(("structuredContent", "inputSchema", "outputSchema", "_meta"))


def bounded(message: Any) -> bool:
    """Drop what is expensive to validate from a parsed message. False if the whole message, one of
    the server's own, is to be dropped."""
    result = getattr(message, "result", None)
    if isinstance(result, dict):
        _cut_lists(result)
        return True
    params = getattr(message, "params", None)
    return params is None or sum(len(container) for container in _containers(params)) <= MAX_ITEMS


def _cut_lists(result: dict[str, Any]) -> None:
    remaining, stack = MAX_ITEMS, [result]
    while stack:
        fields = stack.pop()
        for name, value in fields.items():
            if name in OPAQUE:
                continue
            if isinstance(value, dict):
                stack.append(value)
            elif isinstance(value, list):
                if len(value) > remaining:
                    value = fields[name] = value[:remaining]
                remaining -= len(value)
                stack += [item for item in value if isinstance(item, dict)]


def _containers(value: Any) -> Iterator[Any]:
    stack = [value]
    while stack:
        container = stack.pop()
        yield container
        inner = container.values() if isinstance(container, dict) else container
        stack += [item for item in inner if isinstance(item, (dict, list))]
