from __future__ import annotations

from itertools import product

import pytest

from tandem.shared.handoff.transfer import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeState,
    IllegalTransitionError,
    PrefillState,
    TransferState,
    decode_transfer_state,
    prefill_transfer_state,
)
from tandem.tests.support.clock import SteppedClock

D, P = DecodeState, PrefillState
HAPPY = [D.RESERVED, D.OPENING, D.RECEIVING, D.VERIFYING, D.COMMITTED]


def _decode(clock: SteppedClock) -> TransferState[DecodeState]:
    return decode_transfer_state("transfer 5", request_seconds=60, silence_seconds=3, clock=clock)


def _prefill(clock: SteppedClock) -> TransferState[PrefillState]:
    return prefill_transfer_state(
        "transfer 5", request_seconds=1000, still_seconds=100, clock=clock
    )


def _decode_at(state: DecodeState, clock: SteppedClock) -> TransferState[DecodeState]:
    attempt = _decode(clock)
    path = [D.FAILED] if state is D.FAILED else HAPPY[1 : HAPPY.index(state) + 1]
    for step in path:
        assert attempt.enter(step)
    return attempt


@pytest.mark.parametrize(("state", "news"), list(product(D, D)))
def test_decode_takes_only_what_the_table_allows(state: DecodeState, news: DecodeState) -> None:
    attempt = _decode_at(state, SteppedClock())
    before = {D.RESERVED, state, *(HAPPY[: HAPPY.index(state)] if state in HAPPY else ())}
    if news in before:
        assert not attempt.enter(news)
        assert attempt.state is state
    elif news in DECODE_TRANSITIONS[state]:
        assert attempt.enter(news)
        assert attempt.state is news
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.value} cannot become"):
            attempt.enter(news)
        assert attempt.state is state


@pytest.mark.parametrize("state", list(P))
def test_prefill_can_be_released_from_every_state_once(state: PrefillState) -> None:
    attempt = _prefill(SteppedClock())
    for step in (P.RUNNING, P.STREAMING, P.HELD, P.RELEASED):
        if attempt.state is state:
            break
        assert attempt.enter(step)
    assert attempt.enter(P.RELEASED) == (state is not P.RELEASED)
    assert not attempt.enter(P.RELEASED)
    assert attempt.over


def test_every_state_has_a_row_in_its_table() -> None:
    assert set(DECODE_TRANSITIONS) == set(D)
    assert set(PREFILL_TRANSITIONS) == set(P)


@pytest.mark.parametrize("state", [s for s in D if DECODE_TRANSITIONS[s]])
def test_every_decode_state_that_is_not_the_end_has_a_deadline(state: DecodeState) -> None:
    clock = SteppedClock()
    attempt = _decode_at(state, clock)
    assert not attempt.overdue()
    clock.now += 61
    assert attempt.overdue().startswith(f"{state.value} for 61.0 s")
    assert attempt.remaining <= 0


def _prefill_at(state: PrefillState, clock: SteppedClock) -> TransferState[PrefillState]:
    attempt = _prefill(clock)
    for step in (P.RUNNING, P.STREAMING, P.HELD):
        if attempt.state is not state:
            attempt.enter(step)
    return attempt


@pytest.mark.parametrize("state", [P.QUEUED, P.RUNNING, P.STREAMING])
def test_a_prefill_state_ends_without_progress_and_lasts_with_it(state: PrefillState) -> None:
    clock = SteppedClock()
    attempt = _prefill_at(state, clock)
    for _ in range(9):
        clock.now += 99
        assert not attempt.overdue()
        attempt.progress()
    clock.now += 101
    assert attempt.overdue().startswith(state.value)
    assert not attempt.request_over


@pytest.mark.parametrize("state", [P.QUEUED, P.RUNNING, P.STREAMING, P.HELD])
def test_every_prefill_state_that_holds_something_ends_with_the_request(
    state: PrefillState,
) -> None:
    clock = SteppedClock()
    attempt = _prefill_at(state, clock)
    clock.now += 999
    attempt.progress()
    assert not attempt.overdue() and not attempt.request_over
    clock.now += 1
    assert attempt.overdue().startswith(state.value)
    assert attempt.overdue().endswith("when the request's time was over")


def test_a_state_that_lasts_too_long_is_overdue_and_progress_helps_until_the_request_ends() -> None:
    clock = SteppedClock()
    attempt = _decode_at(D.RECEIVING, clock)
    clock.now += 2
    assert not attempt.overdue()
    attempt.progress()
    clock.now += 2
    assert not attempt.overdue()
    assert attempt.remaining == 1
    clock.now += 2
    assert attempt.overdue() == "receiving for 6.0 s, 4.0 s idle"
    while clock.now < 161:
        attempt.progress()
        clock.now += 2
    assert attempt.overdue()


def test_entering_a_state_begins_its_deadline() -> None:
    clock = SteppedClock()
    attempt = _decode(clock)
    clock.now += 2
    attempt.enter(D.OPENING)
    clock.now += 2
    assert not attempt.overdue()


def test_what_has_ended_is_never_overdue() -> None:
    clock = SteppedClock()
    attempt = _decode_at(D.COMMITTED, clock)
    assert attempt.over
    clock.now += 1e9
    assert not attempt.overdue()
