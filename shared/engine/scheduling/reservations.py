"""Reservations: blocks that a transfer fills with a prompt's KV."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from ...kv.block_pool import OutOfBlocksError
from ..reception import Reception
from ..sequence import Phase, Sequence
from ..work import Generate
from .block_tables import BlockTables
from .preemption import Preemption
from .queues import SequenceQueues

# Blocks that a transfer fills cannot be taken back. So a reservation leaves each running sequence
# room to grow by this many tokens, about what it generates while a prompt is received.
GROWTH_TOKENS = 32


class Reservations:
    """Sequences that receive their prompt, and sequences that wait for blocks to do so.

    ``on_ended`` is called with each reception when its owner ends it.
    """

    def __init__(
        self,
        queues: SequenceQueues,
        tables: BlockTables,
        preemption: Preemption,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._queues = queues
        self._tables = tables
        self._preemption = preemption
        self._max_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._receiving: set[Reception] = set()
        self._ends: dict[Sequence, int] = {}  # of those that ask
        self.on_ended: Callable[[Reception], None] = lambda reception: None

    def __len__(self) -> int:
        return len(self._receiving) + len(self._ends)

    def sequences(self) -> list[Sequence]:
        """Those that receive their prompt, and those that wait for it."""
        return [*(reception.sequence for reception in self._receiving), *self._ends]

    @property
    def asking(self) -> bool:
        """True while a sequence waits for a reservation."""
        return bool(self._ends)

    def goes_before(self, sequence: Sequence) -> bool:
        """True if a sequence that waits for a reservation goes before this one."""
        return self.asking and self._queues.first(self._queues.asking[0], sequence)

    def reserve(self, sequence: Sequence, end: int) -> Reception:
        """Reserve blocks of a new sequence up to token ``end``; it is receiving from now on.

        Later sequences that wait give their blocks up. Raises ``OutOfBlocksError``, also if running
        or earlier sequences would soon lack the blocks. The sequence then keeps only its cached
        prefix.
        """
        self._queues.arrive(sequence)
        return self._reserve(sequence, end)

    def _reserve(self, sequence: Sequence, end: int) -> Reception:
        count = self._tables.missing(sequence, end)
        demand = self._demand_before(sequence)
        self._preemption.reclaim_waiting(sequence, count + demand)
        available = self._tables.pool.counts().available
        if count + demand > available:
            raise OutOfBlocksError(
                f"{count} blocks are missing, and {demand} of the {available} available ones are "
                f"needed by sequences that run or go first"
            )
        blocks = self._tables.reserve(sequence, count)
        sequence.move(Phase.RECEIVING)
        reception = Reception(sequence, blocks, self._queues, self._tables, self._ended)
        self._receiving.add(reception)
        return reception

    def _ended(self, reception: Reception) -> None:
        self._receiving.remove(reception)
        self.on_ended(reception)

    def ask(self, sequence: Sequence, end: int) -> None:
        """Queue a new sequence for ``next_granted``, behind the sequences that go first."""
        self._queues.arrive(sequence)
        insort(self._queues.asking, sequence, key=self._queues.key)
        self._ends[sequence] = end

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue for reservations. Idempotent."""
        if self._ends.pop(sequence, None) is not None:
            self._queues.remove(sequence)

    def next_granted(self) -> Reception | None:
        """Reserve blocks for the first sequence in the queue; ``None`` if there is no room yet."""
        if not self.asking:
            return None
        sequence = self._queues.asking[0]
        self._tables.match_prefix(sequence)
        try:
            reception = self._reserve(sequence, self._ends[sequence])
        except OutOfBlocksError:
            return None
        self.forget(sequence)
        return reception

    def _demand_before(self, newcomer: Sequence) -> int:
        """Blocks that a reservation must leave free: for the growth of running sequences, and for
        earlier waiting sequences with a slot. A private sequence needs few, and may take any."""
        if newcomer.work.private:
            return 0
        missing, queues = self._tables.missing, self._queues
        ends = ((s, min(s.length + GROWTH_TOKENS, self._end(s))) for s in queues.running)
        growth = sum(missing(sequence, end) for sequence, end in ends)
        slots = max(0, self._max_seqs - len(queues.running))  # private ones need none
        earlier = (s for s in queues.waiting[:slots] if queues.first(s, newcomer))
        return growth + sum(missing(sequence, sequence.target) for sequence in earlier)

    def _end(self, sequence: Sequence) -> int:
        """The length at which the sequence ends at the latest."""
        if not isinstance(sequence.work, Generate):
            return sequence.target
        return min(len(sequence.prompt) + sequence.work.params.max_tokens, self._max_model_len)
