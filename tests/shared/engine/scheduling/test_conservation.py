"""Random work in any order: it all ends, in its order, and every block comes back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.engine.plan import StepPlan
from tandem.shared.engine.reception import Reception
from tandem.shared.engine.scheduling.queues import POLICIES
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Phase, Sequence
from tandem.shared.engine.work import Compute, Generate
from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError
from tandem.tests.shared.engine.scheduling.schedulers import (
    make,
    receive,
    reserve,
    run_step,
    sequence,
)


def watch_preemptions(scheduler: Scheduler) -> None:
    """Fail if a sequence is preempted while a later one keeps its blocks."""
    queues, preempt = scheduler._queues, scheduler._preemption._preempt

    def watched(sequence: Sequence) -> None:
        preempt(sequence)
        for other in queues.holders():
            assert queues.first(other, sequence), (
                f"{sequence.sequence_id} was preempted, and {other.sequence_id}, which runs later, "
                f"holds {len(other.block_table)} blocks"
            )

    scheduler._preemption._preempt = watched  # type: ignore[method-assign]


class RandomWork:
    """Received prompts, further choices and transfers in flight, which come and go at any time."""

    def __init__(self, data: st.DataObject, policy: str) -> None:
        self._data = data
        self._blocks = data.draw(st.integers(6, 20))
        slots = data.draw(st.integers(1, 5))
        self.scheduler = Scheduler(
            BlockPool(self._blocks, 4, enable_prefix_cache=data.draw(st.booleans())),
            max_num_batched_tokens=16,
            max_num_seqs=slots,
            max_model_len=4 * self._blocks,
            max_waiting=100,
            policy=policy,
        )
        self.transfers: list[Reception] = []
        self._number = 0

    def draw(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def flip(self) -> bool:
        return self._data.draw(st.booleans())

    def arrive(self) -> None:
        self._number += 2
        if not self.draw(0, 4):
            canary = sequence(self._number, self.draw(2, 12))
            canary.work = Compute(len(canary.prompt) - 1, private=True)
            self.scheduler.enqueue(canary)
            return
        one = self._sequence()
        if self.flip():
            self.scheduler.add(one)
            return
        if self.flip():
            self.scheduler.reservations.ask(one, len(one.prompt) - 1)
            return
        try:
            self.transfers.append(reserve(self.scheduler, one))
        except OutOfBlocksError:
            self.scheduler.enqueue(one)

    def _sequence(self) -> Sequence:
        """One of any length and priority; it may share a prefix, and have a sibling."""
        prompt = self.draw(2, 2 * self._blocks)
        one = sequence(self._number, prompt, max_tokens=self.draw(1, 2 * self._blocks))
        one.priority = self.draw(0, 2)
        if self.flip():
            one.prompt = list(range(prompt))
        if self.flip():
            one.siblings = [sequence(self._number + 1, prompt, max_tokens=4)]
            one.siblings[0].prompt = one.prompt
        return one

    def grant(self) -> None:
        while (granted := self.scheduler.reservations.next_granted()) is not None:
            self.transfers.append(granted)

    def settle(self) -> None:
        reception = self.transfers.pop(self.draw(0, len(self.transfers) - 1))
        if self.draw(0, 3):
            reception.commit(len(reception.sequence.prompt) - 1)
        else:
            reception.abandon()

    def step(self) -> StepPlan | None:
        plan, _ = run_step(self.scheduler)
        for owner in list(self.scheduler._holding):
            self.scheduler.release_blocks(owner)
        return plan

    def finish(self) -> None:
        """Settle every transfer and step until all has ended."""
        for _ in range(2000):
            self.grant()
            while self.transfers:
                self.settle()
            if not self.scheduler.has_work:
                break
            assert self.step() is not None, "work is left and nothing was scheduled: a deadlock"
        assert self.scheduler.idle
        assert self.scheduler.pool.counts().available == self._blocks


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(POLICIES))
def test_no_sequence_is_preempted_while_a_later_one_holds_blocks(
    data: st.DataObject, policy: str
) -> None:
    work = RandomWork(data, policy)
    watch_preemptions(work.scheduler)
    for _ in range(work.draw(5, 25)):
        if work.flip():
            work.arrive()
        if work.transfers and work.flip():
            work.settle()
        work.grant()
        work.step()
    work.finish()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(POLICIES))
def test_everything_ends_and_every_block_returns(data: st.DataObject, policy: str) -> None:
    blocks = data.draw(st.integers(4, 12))
    scheduler = make(blocks=blocks, policy=policy, max_num_seqs=data.draw(st.integers(1, 5)))
    limit = blocks * 4
    alive: list[Sequence] = []
    for n in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(st.integers(1, limit - 2))
        one = sequence(n, prompt, max_tokens=data.draw(st.integers(1, limit - prompt)))
        one.prompt = [data.draw(st.integers(0, 1)) for _ in range(prompt)]
        one.priority = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            one.work = Compute(max(1, prompt - 1))
        alive.append(one)
        if isinstance(one.work, Generate) and prompt > 1 and data.draw(st.booleans()):
            receive(scheduler, one, data.draw(st.sampled_from(["commit", "abandon", "cancel"])))
        else:
            scheduler.add(one)
        for _ in range(data.draw(st.integers(0, 3))):
            run_step(scheduler)
            for owner in list(scheduler._holding):
                scheduler.release_blocks(owner)
        if data.draw(st.booleans()):
            scheduler.cancel(data.draw(st.sampled_from(alive)))
    for _ in range(3000):
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        for owner in list(scheduler._holding):
            scheduler.release_blocks(owner)
        assert plan is not None or not scheduler.has_work
    assert scheduler.idle and scheduler.pool.counts().available == blocks
    assert all(s.phase is Phase.FINISHED for s in alive)
