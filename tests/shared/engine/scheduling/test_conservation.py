"""Random work in any order: it all ends, in its order, and every block comes back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.shared.engine.scheduling.queues import POLICIES
from tandem.shared.engine.scheduling.scheduler import Scheduler
from tandem.shared.engine.sequence import Phase, Sequence
from tandem.shared.kv.block_pool import BlockPool, OutOfBlocksError
from tandem.tests.shared.engine.scheduling.support import make, receive, run_step, sequence


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


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(POLICIES))
def test_no_sequence_is_preempted_while_a_later_one_holds_blocks(
    data: st.DataObject, policy: str
) -> None:
    """Received prompts, further choices and transfers in flight come and go at any time."""
    blocks, slots = data.draw(st.integers(6, 20)), data.draw(st.integers(1, 5))
    scheduler = Scheduler(
        BlockPool(blocks, 4, enable_prefix_cache=data.draw(st.booleans())),
        max_num_batched_tokens=16,
        max_num_seqs=slots,
        max_model_len=4 * blocks,
        max_waiting=100,
        policy=policy,
    )
    watch_preemptions(scheduler)
    transfers: list[tuple[Sequence, list[int]]] = []
    number = 0

    def arrive() -> None:
        nonlocal number
        if not data.draw(st.integers(0, 4)):
            canary = sequence(number, data.draw(st.integers(2, 12)))
            canary.private, canary.compute_until = True, len(canary.prompt) - 1
            number += 2
            scheduler.enqueue(canary)
            return
        prompt = data.draw(st.integers(2, 2 * blocks))
        one = sequence(number, prompt, max_tokens=data.draw(st.integers(1, 2 * blocks)))
        one.priority = data.draw(st.integers(0, 2))
        if data.draw(st.booleans()):
            one.siblings = [sequence(number + 1, prompt, max_tokens=4)]
            one.siblings[0].prompt = one.prompt
        number += 2
        if data.draw(st.booleans()):
            scheduler.add(one)
            return
        if data.draw(st.booleans()):
            scheduler.ask(one, len(one.prompt) - 1)
            return
        scheduler.match_prefix(one)
        try:
            transfers.append((one, scheduler.receive(one, len(one.prompt) - 1)))
        except OutOfBlocksError:
            scheduler.enqueue(one)

    def grant() -> None:
        while (granted := scheduler.next_reservation()) is not None:
            transfers.append(granted)

    def settle() -> None:
        one, reserved = transfers.pop(data.draw(st.integers(0, len(transfers) - 1)))
        if data.draw(st.integers(0, 3)):
            scheduler.commit_received(one, reserved, len(one.prompt) - 1)
        else:
            scheduler.abandon_received(one, reserved)

    for _ in range(data.draw(st.integers(5, 25))):
        if data.draw(st.booleans()):
            arrive()
        settles: bool = data.draw(st.booleans()) if transfers else False
        if settles:
            settle()
        grant()
        run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
    for _ in range(2000):
        grant()
        while transfers:
            settle()
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
        assert plan is not None, "work is left and nothing was scheduled: a deadlock"
    assert scheduler.idle and scheduler.pool.counts().available == blocks


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
            one.compute_until = max(1, prompt - 1)
        alive.append(one)
        if one.compute_until is None and prompt > 1 and data.draw(st.booleans()):
            receive(scheduler, one, data.draw(st.sampled_from(["commit", "abandon", "cancel"])))
        else:
            scheduler.add(one)
        for _ in range(data.draw(st.integers(0, 3))):
            run_step(scheduler)
            for held in list(scheduler._held):
                scheduler.release_held(held)
        if data.draw(st.booleans()):
            scheduler.cancel(data.draw(st.sampled_from(alive)))
    for _ in range(3000):
        if not scheduler.has_work:
            break
        plan, _ = run_step(scheduler)
        for held in list(scheduler._held):
            scheduler.release_held(held)
        assert plan is not None or not scheduler.has_work
    assert scheduler.idle and scheduler.pool.counts().available == blocks
    assert all(s.phase is Phase.FINISHED for s in alive)
