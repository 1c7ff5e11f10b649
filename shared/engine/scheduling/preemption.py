"""Preemption: which sequences lose their blocks when the pool runs out.

The last sequence by policy, running or waiting with blocks (a cached prefix, a received prompt, a
further choice), loses its blocks; its tokens stay, and are computed again later. So the first
sequence always proceeds, nothing deadlocks, and waiting sequences take no blocks from those that go
before them. A sequence that is computed by a step in flight keeps its blocks until the step ends:
they could be reserved for a transfer while the step still writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..sequence import Phase, Sequence
from ..work import Generate
from .block_tables import BlockTables
from .queues import SequenceQueues
from .step_budget import StepBudget
from .steps_in_flight import BlocksInFlightError


class Preemption:
    """Takes blocks back from the sequences of ``queues``. ``on_preempted`` is called for each
    running sequence that loses its blocks."""

    def __init__(
        self,
        queues: SequenceQueues,
        tables: BlockTables,
        on_preempted: Callable[[Sequence], None],
    ) -> None:
        self._queues = queues
        self._tables = tables
        self._on_preempted = on_preempted
        self.count = 0

    def cover(self, sequence: Sequence, end: int, budget: StepBudget) -> bool:
        """Make a running sequence's table reach token ``end``, preempting later sequences.

        False if it was itself preempted, or must wait because no queue has other blocks.
        Raises ``BlocksInFlightError``.
        """
        while not self._tables.cover(sequence, end):
            victim = self._last_holder()
            if victim is sequence and self._is_only_holder(sequence):
                return False
            self._take_blocks(victim, budget)
            if victim is sequence:
                return False
        return True

    def cover_head(self, sequence: Sequence, tokens: int, budget: StepBudget) -> bool:
        """Make the table of the queue's head cover its next ``tokens``; False if it cannot. Raises
        ``BlocksInFlightError``."""
        # KV that is being sent must stay in place, so a prefill-only sequence gets all of its
        # blocks at once and is never preempted for lack of them.
        grows = isinstance(sequence.work, Generate)
        end = sequence.computed + tokens if grows else sequence.target
        self.reclaim_waiting(sequence, self._tables.missing(sequence, end))
        if sequence.work.private:
            self._make_room(sequence, end, budget)
        return self._tables.cover(sequence, end)

    def reclaim_waiting(self, sequence: Sequence, missing: int) -> None:
        """Take the blocks of waiting sequences that go after this one, the last first, until
        ``missing`` are available. No-op if all of them are too few."""
        pool = self._tables.pool
        if missing <= pool.counts().available:
            return
        holders = [s for s in self._queues.waiting_holders() if self._queues.first(sequence, s)]
        if missing > pool.counts().available + pool.freed_by(s.block_table for s in holders):
            return
        while holders and missing > pool.counts().available:
            self._take_blocks(holders.pop())

    def take_from_waiting(self, blocks: Iterable[int]) -> None:
        """Take all blocks of the waiting sequences that share some of these, whose KV is bad."""
        bad = set(blocks)
        for sequence in self._queues.waiting_holders():
            if not bad.isdisjoint(sequence.block_table):
                self._take_blocks(sequence)

    def _last_holder(self) -> Sequence:
        """The last by policy among running sequences and waiting ones with blocks."""
        queues = self._queues
        return max([*queues.running[-1:], *queues.waiting_holders()[-1:]], key=queues.key)

    def _is_only_holder(self, sequence: Sequence) -> bool:
        """True if the blocks that this running sequence lacks are not in any queue: transfers, and
        prompts that are computed and being sent, give them back by themselves."""
        others = len(self._queues.running) > 1 or self._queues.waiting_holders()
        counts = self._tables.pool.counts()
        return not others and counts.reserved + counts.owned > len(sequence.block_table)

    def _make_room(self, sequence: Sequence, end: int, budget: StepBudget) -> None:
        """Take the few blocks that a private sequence lacks from the last sequences by policy, but
        not blocks whose KV is being sent."""
        while self._tables.missing(sequence, end) > self._tables.pool.counts().available:
            victims = [s for s in self._queues.holders() if isinstance(s.work, Generate)]
            if not victims:
                return
            self._take_blocks(max(victims, key=self._queues.key), budget)

    def _take_blocks(self, victim: Sequence, budget: StepBudget | None = None) -> None:
        """Take a sequence's blocks; its tokens are computed again later."""
        if victim.in_flight:
            raise BlocksInFlightError
        if budget is not None:
            budget.take_back(victim)
        if victim.phase is Phase.RUNNING:
            self._preempt(victim)
        else:
            self._tables.release(victim)
            victim.received = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        self._tables.release(sequence)
        self._on_preempted(sequence)
        if not sequence.has_drawn:
            sequence.received = 0
            sequence.prompt_logprobs.clear()
            sequence.hidden.clear()
        sequence.preemptions += 1
        self.count += 1
        self._queues.wait(sequence)
