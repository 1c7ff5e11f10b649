"""Bounds on what a message of a server costs.

The SDK parses and checks messages in C, which holds up all threads of the router: a megabyte of
empty lists for 0.2 s, one of invalid blocks for 6 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of one message: each value counts as one, each array and object as several. It is parsed within
# ten milliseconds.
MAX_COST = 48 * 1024
CONTAINER_COST = 6
# Bytes that may be read instead of a value, when servers send too much.
PACED_BYTES = 16
# Of all lists of one message together, such as content blocks and tools; each is checked within
# 20 us. Further ones are left out.
MAX_ITEMS = 768
# Fields that are not checked.
OPAQUE = frozenset(("structuredContent", "inputSchema", "outputSchema", "_meta"))


class MessageCost:
    """The cost of a message that arrives in pieces. In a stream of ``events`` each event is a
    message, and the cost is the present one's."""

    def __init__(self, *, events: bool = False) -> None:
        self.cost = 0
        self.unpaced = 0
        self._events = events
        self._in_string = False
        self._begun = b""  # of an escape

    def add(self, data: bytes) -> int:
        """Add the next bytes. Returns the largest cost that the message has had."""
        data = self._begun + data
        odd = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._begun = data[-1:] if odd else b""
        data = data[: len(data) - len(self._begun)]
        unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
        most = 0
        first, *others = unescaped.split(b"\n")
        self._add_line(first)
        for line in others:
            most = max(most, self.cost)
            self._in_string = False  # no string goes on in another line
            if self._events and not line.strip():
                self.cost = 0
            self._add_line(line)
        return max(most, self.cost)

    def take_bytes(self) -> int:
        """What has been added since the last call of this method, in bytes that take as long."""
        taken, self.unpaced = self.unpaced, 0
        return taken

    def _add_line(self, line: bytes) -> None:
        parts = line.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        containers = outside.count(b"{") + outside.count(b"[")
        cost = outside.count(b",") + CONTAINER_COST * containers
        self.cost += cost
        self.unpaced += len(line) + PACED_BYTES * cost


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
