"""Bounds on what is checked of a server's message.

The SDK checks messages in C, which holds up all threads of the router: a megabyte of invalid blocks
for 6 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of all lists of one message together, such as content blocks and tools; each is checked within
# 20 us. Further ones are left out.
MAX_ITEMS = 768
# Fields that are not checked.
OPAQUE = frozenset(("structuredContent", "inputSchema", "outputSchema", "_meta"))


def bounded(message: Any) -> bool:
    """Cut what costs too much to check out of a message that has been parsed; false for one of the
    server's own that is left out altogether."""
    result = getattr(message, "result", None)
    if isinstance(result, dict):
        _cut_lists(result)
        return True
    params = getattr(message, "params", None)
    return params is None or sum(len(each) for each in _containers(params)) <= MAX_ITEMS


def _cut_lists(result: dict[str, Any]) -> None:
    left, waiting = MAX_ITEMS, [result]
    while waiting:
        fields = waiting.pop()
        for name, value in fields.items():
            if name in OPAQUE:
                continue
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, list):
                if len(value) > left:
                    value = fields[name] = value[:left]
                left -= len(value)
                waiting += [item for item in value if isinstance(item, dict)]


def _containers(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        inner = each.values() if isinstance(each, dict) else each
        waiting += [item for item in inner if isinstance(item, (dict, list))]
