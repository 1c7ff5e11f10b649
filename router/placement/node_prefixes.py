"""Which nodes hold the prefix of a prompt, by the short keys that their heartbeats tell.

A node's keys are those of its own block size, and begin with the salt of the tenant whose prompt
they are of; a prompt's are computed with its own salt, so that it is never matched with another's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from ...proto import tandem_pb2 as pb
from ...shared.kv.prefix_keys import chain, short_key, unpack_keys
from .held_keys import KeySet
from .prefix_table import Column

# A node tells a quarter of it; one that says more is not believed at all.
MAX_KEYS = 1 << 16
# Keys that are computed of one prompt at the most, all block sizes together: some 30 ms, in which
# no stream goes on. Half of them are 131,072 tokens in blocks of 16; what is beyond is not matched.
MAX_PROMPT_KEYS = 1 << 14


class PromptKeys:
    """The chained short keys of one prompt, computed once for each block size that is met, and of
    the leading blocks alone where there are very many."""

    def __init__(self, tokens: Sequence[int], salt: str = "") -> None:
        self.tokens = tokens
        self.salt = salt
        self._keys: dict[int, list[int]] = {}
        self._left = MAX_PROMPT_KEYS
        self._samples: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def sample(self, block_size: int, stride: int) -> list[tuple[int, int]]:
        """The keys that a node tells when it holds them, and how many tokens lead up to the end
        of each one's block; first to last."""
        if (block_size, stride) not in self._samples:
            numbered = enumerate(self._of(block_size), 1)
            found = [(number * block_size, key) for number, key in numbered if not key % stride]
            self._samples[block_size, stride] = found
        return self._samples[block_size, stride]

    def _of(self, block_size: int) -> list[int]:
        if block_size not in self._keys:
            # Half of what is left, so that a node with tiny blocks leaves some for other sizes.
            most = self._left // 2 * block_size
            tokens = self.tokens if len(self.tokens) <= most else self.tokens[:most]
            keys = [short_key(key) for key in chain(tokens, block_size, self.salt)]
            self._keys[block_size] = keys
            self._left -= len(keys)
        return self._keys[block_size]


class NodePrefixes:
    """What one node holds, by its own word."""

    def __init__(self) -> None:
        self.version = 0
        self.block_size = 0  # 0: it has told nothing
        self._stride = 1
        self._column: Column[Any] | None = None
        self._count = 0  # of keys, at most
        self._keys = KeySet()

    def __len__(self) -> int:
        return len(self._keys)

    def update(self, told: pb.Prefixes) -> None:
        """Take what has changed. A change of a version that is not known here is passed over: the
        reply says which one is, and the node tells the whole."""
        if told.base > self.version or told.version < max(1, self.version):
            return
        added, removed = unpack_keys(told.added), unpack_keys(told.removed)
        if told.base:
            self._keys.update(added, removed)
            self._count += len(added)
            if self._column is not None:
                self._column.add(added)
                self._column.outdated(len(removed), self._keys.all)
        else:
            self._count = len(added)
            self._keys = KeySet(added if self._count <= MAX_KEYS else ())
        if self._count > MAX_KEYS:
            self._count = len(self._keys)
        self._stride = max(1, told.stride)
        self.block_size = told.block_size if self._count <= MAX_KEYS else 0
        if not self.block_size:
            self._keys, self._count = KeySet(), 0
        if self._column is not None:
            if not told.base or not self.block_size:
                self._column.replace(self._keys.all())
            self._column.shape(self.block_size, self._stride)
        self.version = told.version

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def show_in(self, column: Column[Any]) -> None:
        """Be found by what is held, from now on."""
        self._column = column
        column.replace(self._keys.all())
        column.shape(self.block_size, self._stride)

    def hand_to(self, owner: object) -> None:
        """The same node has come back as another object."""
        if self._column is not None:
            self._column.owner = owner

    def hide(self) -> None:
        """Be found no more."""
        if self._column is not None:
            self._column.release()
            self._column = None

    def expect(self, keys: Sequence[int]) -> None:
        """Be found by these too, which the node has not told yet and may never tell."""
        if self._column is not None:
            self._column.outdated(len(keys), self._keys.all)
            self._column.add(array("Q", keys))

    def sample(self, prompt: PromptKeys) -> list[tuple[int, int]]:
        """The keys of a prompt that the node would tell if it held them, with the tokens up to
        each; none when it has told nothing."""
        return prompt.sample(self.block_size, self._stride) if self.block_size else []

    def matched(
        self, prompt: PromptKeys, expected: Callable[[int], bool] = lambda key: False
    ) -> int:
        """How many leading tokens of a prompt it holds; the last is always computed.

        ``expected`` are keys that it has not told yet. A node evicts the end of a prefix before
        its beginning, so the last key that it holds is found by halving.
        """
        sample = self.sample(prompt)

        def lacks(item: tuple[int, int]) -> bool:
            return item[1] not in self._keys and not expected(item[1])

        if not sample or lacks(sample[0]):
            return 0
        count = bisect_left(sample, True, lo=1, key=lacks)
        return min(sample[count - 1][0], len(prompt.tokens) - 1) if count else 0
