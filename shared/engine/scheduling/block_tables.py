"""Block tables of sequences: how they grow, shrink, and enter the prefix index."""

from __future__ import annotations

from ...kv.block_pool import BlockPool, OutOfBlocksError
from ...kv.prefix_keys import chain_keys
from ..sequence import Sequence


class BlockTables:
    """Moves blocks between the pool and sequences. The pool owns the blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def missing(self, sequence: Sequence, end: int) -> int:
        """The number of blocks that the table lacks to reach token ``end``."""
        return max(0, -(-end // self.pool.block_size) - len(sequence.block_table))

    def cover(self, sequence: Sequence, end: int) -> bool:
        """Make the table reach token ``end``; False if the pool lacks the blocks."""
        count = self.missing(sequence, end)
        if not count:
            return True
        try:
            sequence.block_table.extend(self.pool.allocate(count, _last(sequence)))
        except OutOfBlocksError:
            return False
        return True

    def reserve(self, sequence: Sequence, count: int) -> list[int]:
        """Extend the table by blocks that a transfer fills. Raises ``OutOfBlocksError``."""
        reserved = self.pool.reserve(count, _last(sequence))
        sequence.block_table.extend(reserved)
        return reserved

    def drop_reservation(self, sequence: Sequence, reserved: list[int]) -> None:
        self.pool.cancel_reservation(reserved)
        if reserved:
            del sequence.block_table[-len(reserved) :]

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back. The tokens stay, and are computed again."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.computed = sequence.published = 0

    # ---- the prefix index ------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that waits the longest cached prefix of its tokens, which may have grown
        since the last time.

        The last token is never taken from the cache: its logits are needed, and a sequence with
        nothing left to compute would be a special case everywhere. No block is taken if every
        position must be computed, for prompt logprobs or hidden states.
        """
        size, held = self.pool.block_size, len(sequence.block_table)
        if sequence.work.private or sequence.wants_every_position:
            return
        if sequence.computed != held * size:
            return  # received up to the middle of a block
        self._extend_keys(sequence)
        found = self.pool.match(sequence.keys[held : (sequence.target - 1) // size])
        sequence.block_table += found
        sequence.computed += len(found) * size
        sequence.published += len(found)
        if not sequence.preemptions:
            sequence.cached = len(found) * size + (sequence.cached if held else 0)

    def publish(self, sequence: Sequence) -> None:
        """Index the blocks that are full."""
        full = sequence.computed // self.pool.block_size
        if full <= sequence.published or sequence.work.private:
            return
        if full > len(sequence.keys):  # more often would copy all tokens for each new block
            self._extend_keys(sequence)
        for i in range(sequence.published, full):
            self.pool.publish(sequence.block_table[i], sequence.keys[i])
        sequence.published = full

    def unpublish(self, sequence: Sequence) -> None:
        """Remove every block from the index: it is unknown which ones have bad KV."""
        self.pool.unpublish(sequence.block_table)

    def _extend_keys(self, sequence: Sequence) -> None:
        if len(sequence.keys) == sequence.length // self.pool.block_size:
            return
        sequence.keys = chain_keys(
            sequence.tokens(0, sequence.length),
            self.pool.block_size,
            sequence.salt,
            sequence.keys,
        )

    # ---- the choices of one request --------------------------------------------------------

    def resume_at(self, sequence: Sequence) -> int:
        """The first token to compute here once all prompt tokens but the last are received.

        With several choices, each computes the prompt's last block itself.
        """
        last = len(sequence.prompt) - 1
        return last // self.pool.block_size * self.pool.block_size if sequence.siblings else last

    def share_prompt(self, leader: Sequence, sibling: Sequence) -> None:
        """Share the prompt's full blocks with a sibling."""
        size = self.pool.block_size
        shared = leader.block_table[: self.resume_at(leader) // size]
        self.pool.share(shared)
        sibling.block_table = list(shared)
        sibling.computed = len(shared) * size
        sibling.published = len(shared)
        sibling.keys = leader.keys[: len(shared)]
        sibling.cached, sibling.received = leader.cached, leader.received


def _last(sequence: Sequence) -> int | None:
    return sequence.block_table[-1] if sequence.block_table else None
