"""The prefixes that a node holds, by the short keys in its heartbeats.

A node's keys depend on its block size, and their chains start with the salt of the prompt's tenant.
A prompt's keys are computed with its own salt, so it never matches another tenant's prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.kv.prefix_keys import chain, short_keys, unpack_keys
from .key_set import KeySet
from .prefix_table import Column

# A node reports at most a quarter of this; a larger set is ignored.
MAX_KEYS = 1 << 16
# Keys computed for one prompt, over all block sizes: about 30 ms, during which streams wait. Half
# of them cover 131,072 tokens in blocks of 16; later tokens are not matched.
MAX_PROMPT_KEYS = 1 << 14


class PromptKeys:
    """The chained short keys of one prompt, computed once for each block size among the nodes, and
    only for the leading blocks of a very long prompt."""

    def __init__(self, tokens: Sequence[int], salt: str = "") -> None:
        self.tokens = tokens
        self.salt = salt
        self._keys: dict[int, list[int]] = {}
        self._budget = MAX_PROMPT_KEYS
        self._samples: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def sample(self, block_size: int, stride: int) -> list[tuple[int, int]]:
        """The keys that a node with this stride would report, each with the number of tokens up to
        the end of its block, in order."""
        if (block_size, stride) not in self._samples:
            numbered = enumerate(self._chain(block_size), 1)
            keys = [(number * block_size, key) for number, key in numbered if not key % stride]
            self._samples[block_size, stride] = keys
        return self._samples[block_size, stride]

    def _chain(self, block_size: int) -> list[int]:
        if block_size not in self._keys:
            # Half of the remaining budget, so that tiny blocks leave some for other block sizes.
            max_tokens = self._budget // 2 * block_size
            tokens = self.tokens if len(self.tokens) <= max_tokens else self.tokens[:max_tokens]
            keys = short_keys(chain(tokens, block_size, self.salt))
            self._keys[block_size] = keys
            self._budget -= len(keys)
        return self._keys[block_size]


class NodePrefixes:
    """The prefixes that one node has reported."""

    def __init__(self) -> None:
        self.version = 0
        self.block_size = 0  # 0: nothing reported
        self._stride = 1
        self._column: Column[Any] | None = None
        self._count = 0  # upper bound of the number of keys
        self.keys = KeySet()

    def __len__(self) -> int:
        return len(self.keys)

    def update(self, report: pb.Prefixes) -> None:
        """Apply a report of changes. One based on a version other than ours is ignored: the reply
        names our version, and the node then reports everything."""
        if report.base > self.version or report.version < max(1, self.version):
            return
        added, removed = unpack_keys(report.added), unpack_keys(report.removed)
        if report.base:
            self.keys.update(added, removed)
            self._count += len(added)
            if self._column is not None:
                self._column.add(added)
                self._column.outdated(len(removed), self.keys.all)
        else:
            self._count = len(added)
            self.keys = KeySet(added if self._count <= MAX_KEYS else ())
        if self._count > MAX_KEYS:
            self._count = len(self.keys)
        self._stride = max(1, report.stride)
        self.block_size = report.block_size if self._count <= MAX_KEYS else 0
        if not self.block_size:
            self.keys, self._count = KeySet(), 0
        if self._column is not None:
            if not report.base or not self.block_size:
                self._column.replace(self.keys.all())
            self._column.shape(self.block_size, self._stride)
        self.version = report.version

    def show_in(self, column: Column[Any]) -> None:
        """Enter the keys into a column of the prefix table."""
        self._column = column
        column.replace(self.keys.all())
        column.shape(self.block_size, self._stride)

    def hand_to(self, owner: object) -> None:
        """Set the column's owner, for a node that has returned."""
        if self._column is not None:
            self._column.owner = owner

    def hide(self) -> None:
        """Release the column."""
        if self._column is not None:
            self._column.release()
            self._column = None

    def expect(self, keys: Sequence[int]) -> None:
        """Enter keys that the node has not reported yet, and may never report."""
        if self._column is not None:
            self._column.outdated(len(keys), self.keys.all)
            self._column.add(array("Q", keys))

    def sample(self, prompt: PromptKeys) -> list[tuple[int, int]]:
        """The prompt's keys that this node would report, each with its number of tokens; empty if
        it has reported nothing."""
        return prompt.sample(self.block_size, self._stride) if self.block_size else []

    def matched(
        self, prompt: PromptKeys, expected: Callable[[int], bool] = lambda key: False
    ) -> int:
        """The number of leading tokens of a prompt that the node holds, without the last token,
        which is always computed.

        ``expected`` is true for keys that are not reported yet. A node evicts the end of a prefix
        before its beginning, so the last key is found by bisection.
        """
        sample = self.sample(prompt)

        if not sample or not (self._holds(sample[0][1]) or expected(sample[0][1])):
            return 0

        def lacks(item: tuple[int, int]) -> bool:
            return item[1] not in self.keys and not expected(item[1])

        count = bisect_left(sample, True, lo=1, key=lacks)
        return min(sample[count - 1][0], len(prompt.tokens) - 1)

    def _holds(self, key: int) -> bool:
        """True if the node holds the key; fast for most keys that it does not."""
        return (self._column is None or self._column.may_hold(key)) and key in self.keys
