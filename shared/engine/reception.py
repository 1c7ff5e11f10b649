"""A handle to reserved blocks that a transfer fills with a prompt's KV."""

from __future__ import annotations

from collections.abc import Callable

from .scheduling.block_tables import BlockTables
from .scheduling.queues import SequenceQueues
from .sequence import FinishReason, Phase, Sequence


class Reception:
    """The reserved ``blocks`` at the end of a sequence's table. Its owner ends it, exactly once.

    Until then the sequence is receiving: it is in no queue, keeps its blocks, and is cancelled only
    from here. End it only when no rank can write the blocks any longer.
    """

    def __init__(
        self,
        sequence: Sequence,
        blocks: list[int],
        queues: SequenceQueues,
        tables: BlockTables,
        on_end: Callable[[Reception], None],
    ) -> None:
        self.sequence = sequence
        self.blocks = blocks
        self.wait_seconds = 0.0  # until the blocks were available
        self._queues = queues
        self._tables = tables
        self._on_end = on_end
        self._ended = False

    @property
    def resume_at(self) -> int:
        """The first token to compute here once all prompt tokens but the last have arrived."""
        return self._tables.resume_at(self.sequence)

    def commit(self, end: int, whole_from: int = 0) -> None:
        """Schedule the sequence: its blocks are filled up to token ``end``.

        Layers with a window lack KV before token ``whole_from``. This sequence does not need it,
        but one that branches off among these tokens would, so their blocks never enter the prefix
        index.
        """
        self._end_once()
        sequence, pool = self.sequence, self._tables.pool
        pool.commit(self.blocks)
        sequence.received = end - sequence.computed
        sequence.computed = end
        sequence.published = max(sequence.published, -(-whole_from // pool.block_size))
        self._tables.publish(sequence)
        self._queues.wait(sequence)
        self._on_end(self)

    def abandon(self) -> None:
        """Give the blocks back, and queue the sequence to be prefilled here."""
        self._end_once()
        self._tables.drop_reservation(self.sequence, self.blocks)
        self._queues.wait(self.sequence)
        self._on_end(self)

    def cancel(self) -> None:
        """Give the blocks back, and end the sequence."""
        self._end_once()
        self._tables.drop_reservation(self.sequence, self.blocks)
        self.sequence.move(Phase.FINISHED)
        self.sequence.finish_reason = FinishReason.CANCELLED
        self._tables.release(self.sequence)
        self._on_end(self)

    def _end_once(self) -> None:
        if self._ended:
            raise RuntimeError(f"the reception of sequence {self.sequence.sequence_id} has ended")
        self._ended = True
