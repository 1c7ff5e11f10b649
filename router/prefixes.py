"""Which nodes hold the prefix of a prompt, by the short keys that their heartbeats tell.

A node's keys are those of its own block size, and begin with the salt of the tenant whose prompt
they are of; a prompt's are computed with its own salt, so that it is never matched with another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from ..proto import tandem_pb2 as pb
from ..shared.kv.prefix_keys import chain, short_key

# A node tells a quarter of it; one that says more is not believed at all.
MAX_KEYS = 1 << 16


class PromptKeys:
    """The chained short keys of one prompt, computed only as far as somebody looks."""

    def __init__(self, tokens: Sequence[int], salt: str = "") -> None:
        self.tokens = tokens
        self.salt = salt
        self._chains: dict[int, tuple[list[int], Iterator[int]]] = {}

    def of(self, block_size: int) -> Iterator[int]:
        """The keys of its full blocks, first to last."""
        if block_size not in self._chains:
            keys = chain(self.tokens, block_size, self.salt)
            self._chains[block_size] = [], map(short_key, keys)
        known, rest = self._chains[block_size]
        for number in count():
            if number == len(known):
                key = next(rest, None)
                if key is None:
                    return
                known.append(key)
            yield known[number]


class HeldPrefixes:
    """What one node holds, by its own word."""

    def __init__(self) -> None:
        self.version = 0
        self.block_size = 0  # 0: it has told nothing
        self._stride = 1
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def update(self, told: pb.Prefixes) -> None:
        """Take what has changed. A change of a version that is not known here is passed over: the
        reply says which one is, and the node tells the whole."""
        if told.base > self.version or told.version < max(1, self.version):
            return
        if not told.base:
            self._keys.clear()
        self._keys.difference_update(told.removed)
        self._keys.update(told.added)
        self._stride = max(1, told.stride)
        self.block_size = told.block_size if len(self._keys) <= MAX_KEYS else 0
        if not self.block_size:
            self._keys.clear()
        self.version = told.version

    def sample(self, prompt: PromptKeys) -> Iterator[tuple[int, int]]:
        """The keys of a prompt that the node would tell if it held them: how many tokens lead up
        to the end of the block, and the key."""
        if not self.block_size:
            return
        for number, key in enumerate(prompt.of(self.block_size), 1):
            if not key % self._stride:
                yield number * self.block_size, key

    def matched(
        self, prompt: PromptKeys, expected: Callable[[int], bool] = lambda key: False
    ) -> int:
        """How many leading tokens of a prompt it holds, at least; its last is always computed.

        ``expected`` are keys that it has not told yet.
        """
        held = 0
        for tokens, key in self.sample(prompt):
            if key not in self._keys and not expected(key):
                break
            held = tokens
        return min(held, len(prompt.tokens) - 1)
