"""Prompts that are received: what is reserved for them, and what they give way to."""

from __future__ import annotations

import pytest

from tandem.shared.engine.reception import Reception
from tandem.shared.engine.sequence import FinishReason, Phase
from tandem.shared.engine.work import Compute
from tandem.shared.kv.block_pool import OutOfBlocksError
from tandem.tests.shared.engine.scheduling.schedulers import (
    drain,
    make,
    receive,
    reserve,
    run_step,
    sequence,
)
from tandem.tests.support.step_rows import rows_of


def test_received_prefix_leaves_one_token_to_compute() -> None:
    scheduler = make()
    one = sequence(1, 11, max_tokens=1)
    reception = reserve(scheduler, one)
    assert scheduler.pool.counts().reserved == 3 and scheduler.schedule() is None
    reception.commit(10)
    plan, _ = run_step(scheduler)
    assert plan is not None and rows_of(plan)[0].start == 10
    assert len(rows_of(plan)[0].tokens) == 1


def test_a_failed_transfer_is_prefilled_here() -> None:
    scheduler = make()
    one = sequence(1, 11, max_tokens=1)
    reserve(scheduler, one).abandon()
    drain(scheduler)
    assert one.finish_reason is FinishReason.LENGTH


def test_a_prefill_only_sequence_holds_its_blocks_until_released() -> None:
    scheduler = make()
    one = sequence(1, 20)
    one.work = Compute(19)
    scheduler.add(one)
    run_step(scheduler)
    assert len(one.block_table) == 5, "all at once, though the step computes 16 tokens"
    drain(scheduler)
    assert one.finish_reason is FinishReason.COMPUTED and scheduler.pool.counts().owned == 5
    scheduler.release_blocks(one)
    assert scheduler.pool.counts().owned == 0 and scheduler.pool.counts().cached == 4


def test_a_prompt_that_lacks_what_others_send_waits_instead_of_starting_over() -> None:
    scheduler = make(blocks=8)
    sent, one = sequence(1, 16), sequence(2, 24, max_tokens=1)
    sent.work = Compute(16)
    scheduler.add(sent)
    run_step(scheduler)
    scheduler.add(one)
    run_step(scheduler)
    assert (one.computed, scheduler.pool.counts().available) == (16, 0)
    assert scheduler.schedule() is None and not scheduler.preemptions
    scheduler.release_blocks(sent)
    drain(scheduler)
    assert one.finish_reason is FinishReason.LENGTH and not scheduler.preemptions


def test_received_prompts_that_wait_give_way_to_streams_that_run() -> None:
    scheduler = make(blocks=24, max_num_seqs=3, max_model_len=64)
    streams = [sequence(n, 4, max_tokens=28) for n in range(3)]
    for one in streams:
        scheduler.add(one)
    later = [sequence(10 + n, 13, max_tokens=4) for n in range(4)]
    for one in later:
        receive(scheduler, one, "commit")
    assert scheduler.pool.counts().owned == 12
    while any(s.phase is not Phase.FINISHED for s in streams):
        run_step(scheduler)
        assert not any(s.preemptions for s in streams)
    drain(scheduler)
    assert all(len(s.outputs) == 4 for s in later)


def test_the_head_of_the_queue_takes_back_what_later_ones_hold() -> None:
    scheduler = make(blocks=16, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
    scheduler.add(runner := sequence(1, 4, max_tokens=12))
    received = sequence(2, 24, max_tokens=2)
    reception = reserve(scheduler, received)
    scheduler.add(head := sequence(3, 40, max_tokens=2))
    head.arrival, received.arrival = received.arrival, head.arrival
    run_step(scheduler)
    assert head.phase is Phase.WAITING, "only a transfer holds what it lacks"
    reception.commit(23)
    run_step(scheduler)
    assert runner.phase is head.phase is Phase.RUNNING and received.received == 0
    drain(scheduler)


def test_what_would_not_do_is_not_taken_back() -> None:
    scheduler = make(blocks=16, max_num_batched_tokens=64, max_num_seqs=3, max_model_len=64)
    scheduler.add(sequence(1, 27, max_tokens=4))
    run_step(scheduler)
    received = sequence(3, 10, max_tokens=2)
    reception = reserve(scheduler, received)
    head = sequence(2, 50, max_tokens=2)
    scheduler.add(head)
    head.arrival = 2
    received.arrival = 3
    reception.commit(9)
    run_step(scheduler)
    assert head.phase is Phase.WAITING and received.received == 9
    drain(scheduler)
    assert received.received == 9


def test_a_reservation_leaves_running_sequences_room_to_grow() -> None:
    scheduler = make(blocks=16, max_model_len=64)
    scheduler.add(sequence(1, 4, max_tokens=40))
    run_step(scheduler)
    one = sequence(2, 21)
    with pytest.raises(OutOfBlocksError, match="9 of the 15 available ones are needed"):
        reserve(scheduler, one, 28)
    assert len(reserve(scheduler, one, 24).blocks) == 6


def test_a_reservation_leaves_waiting_sequences_what_they_lack() -> None:
    scheduler = make(blocks=16, max_num_seqs=1)
    scheduler.add(sequence(1, 40))
    one = sequence(2, 30)
    with pytest.raises(OutOfBlocksError, match="10 of the 16"):
        reserve(scheduler, one, 28)
    run_step(scheduler)
    scheduler.add(sequence(3, 40))  # it has no slot to run in, whatever blocks are free
    assert len(reserve(scheduler, one, 4).blocks) == 1


def test_reservations_are_granted_in_turn_and_nothing_overtakes_them() -> None:
    scheduler = make(blocks=16, max_num_seqs=4, max_model_len=64)
    scheduler.add(runner := sequence(1, 24, max_tokens=2))
    run_step(scheduler)
    reservations = scheduler.reservations
    reservations.ask(large := sequence(2, 45, max_tokens=1), 44)
    reservations.ask(small := sequence(3, 9, max_tokens=1), 8)
    scheduler.add(local := sequence(4, 4, max_tokens=1))
    assert scheduler.waiting == 3 and reservations.next_granted() is None
    run_step(scheduler)
    assert local.phase is Phase.WAITING
    while not runner.finish_reason:
        assert reservations.next_granted() is None
        run_step(scheduler)
    first = reservations.next_granted()
    assert first is not None and first.sequence is large and len(first.blocks) == 11
    second = reservations.next_granted()
    assert second is not None and second.sequence is small
    first.commit(44)
    second.commit(8)
    drain(scheduler)
    assert scheduler.idle


def test_a_reservation_waits_with_its_prefix_until_streams_need_it() -> None:
    scheduler = make(blocks=16, max_num_batched_tokens=64, max_model_len=64)
    scheduler.add(sequence(1, 24, max_tokens=1))
    drain(scheduler)
    scheduler.add(runner := sequence(2, 24, max_tokens=24))
    run_step(scheduler)
    reservations, pool = scheduler.reservations, scheduler.pool
    reservations.ask(one := sequence(1, 41, max_tokens=1), 40)
    kept = []
    while not (runner.finish_reason or runner.preemptions):
        assert reservations.next_granted() is None
        kept.append(len(one.block_table))
        run_step(scheduler)
    assert (kept[0], kept[-1]) == (6, 4) and not runner.preemptions
    granted = reservations.next_granted()
    assert granted is not None and (one.cached, len(granted.blocks)) == (16, 6)
    granted.cancel()
    assert scheduler.idle and pool.counts().available == 16


def test_a_request_may_end_while_it_waits_for_a_reservation() -> None:
    scheduler = make(blocks=16, max_model_len=64)
    reservations = scheduler.reservations
    reservations.ask(one := sequence(1, 40), 39)
    scheduler.cancel(one)
    assert scheduler.idle and not reservations.asking and reservations.next_granted() is None


def test_a_reception_ends_only_once() -> None:
    scheduler = make()
    receptions: list[Reception] = []
    scheduler.reservations.on_ended = receptions.append
    reception = reserve(scheduler, one := sequence(1, 11, max_tokens=1))
    reception.commit(10)
    for end_again in (lambda: reception.commit(10), reception.abandon, reception.cancel):
        with pytest.raises(RuntimeError, match="the reception of sequence 1 has ended"):
            end_again()
    assert receptions == [reception] and (one.phase, one.received) == (Phase.WAITING, 10)
    scheduler.pool.check()
    drain(scheduler)
    assert scheduler.idle


def test_a_cancelled_reception_ends_its_sequence_and_frees_its_prefix_too() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 11, max_tokens=1))
    drain(scheduler)
    again = sequence(1, 11, max_tokens=1)
    reception = reserve(scheduler, again)
    assert again.cached == 8 and scheduler.pool.counts().owned == 2
    reception.cancel()
    assert (again.phase, again.finish_reason) == (Phase.FINISHED, FinishReason.CANCELLED)
    assert again.block_table == [] and scheduler.idle
    assert scheduler.pool.counts().available == 32
