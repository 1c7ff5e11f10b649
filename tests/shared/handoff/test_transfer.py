from __future__ import annotations

from itertools import product

import pytest

from tandem.shared.handoff.transfer import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeState,
    DecodeTransfer,
    IllegalTransitionError,
    PrefillState,
    PrefillTransfer,
)

D, P = DecodeState, PrefillState
HAPPY = [D.OPENING, D.RECEIVING, D.VERIFYING, D.COMMITTED, D.DECODING]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _decode_at(state: DecodeState, clock: Clock) -> DecodeTransfer:
    transfer = DecodeTransfer(5, clock=clock)
    for step in HAPPY:
        if transfer.state is state or state is D.FAILED:
            break
        transfer.advance(1, step)
    if state is D.FAILED:
        transfer.fail(1)
    return transfer


@pytest.mark.parametrize(("state", "news"), list(product(D, D)))
def test_decode_takes_only_what_the_table_allows(state, news):
    transfer = _decode_at(state, Clock())
    before = {D.RESERVED} | set(HAPPY[: HAPPY.index(state) + 1] if state in HAPPY else ())
    before |= {state}
    if news in before:
        assert not transfer.advance(1, news)
        assert transfer.state is state
    elif news in DECODE_TRANSITIONS[state]:
        assert transfer.advance(1, news)
        assert transfer.state is news
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.value} cannot become"):
            transfer.advance(1, news)
        assert transfer.state is state


@pytest.mark.parametrize("state", list(P))
def test_prefill_can_be_released_from_every_state_once(state):
    transfer = PrefillTransfer(5, 1, clock=Clock())
    for step in (P.RUNNING, P.STREAMING, P.HELD, P.RELEASED):
        if transfer.state is state:
            break
        assert transfer.advance(1, step)
    assert transfer.release(1) == (state is not P.RELEASED)
    assert not transfer.release(1)
    assert transfer.over


def test_every_state_has_a_row_in_its_table():
    assert set(DECODE_TRANSITIONS) == set(D)
    assert set(PREFILL_TRANSITIONS) == set(P)


def test_decode_ignores_news_of_an_older_attempt():
    transfer = _decode_at(D.RECEIVING, Clock())
    transfer.fail(1)
    assert transfer.retry() == 2
    assert not transfer.advance(1, D.VERIFYING)
    assert not transfer.fail(1)
    assert transfer.state is D.RESERVED
    assert transfer.advance(2, D.OPENING)


def test_news_of_an_attempt_that_was_never_begun_is_an_error():
    with pytest.raises(IllegalTransitionError, match="attempt 2"):
        DecodeTransfer(5, clock=Clock()).advance(2, D.OPENING)


def test_only_a_failed_attempt_is_tried_again():
    with pytest.raises(IllegalTransitionError, match="only a failed one"):
        DecodeTransfer(5, clock=Clock()).retry()


def test_a_state_that_lasts_too_long_is_overdue_and_progress_helps_only_so_far():
    clock = Clock()
    transfer = _decode_at(D.RECEIVING, clock)
    clock.now += 29
    assert not transfer.overdue()
    transfer.progress(1)
    clock.now += 29
    assert not transfer.overdue()
    clock.now += 2
    assert transfer.overdue().startswith("receiving for 60.0 s, 31.0 s idle")
    for _ in range(20):
        transfer.progress(1)
        clock.now += 20
    assert transfer.overdue()


def test_progress_of_an_older_attempt_does_not_count():
    clock = Clock()
    transfer = _decode_at(D.RECEIVING, clock)
    before = transfer.deadline
    clock.now += 5
    transfer.progress(0)
    assert transfer.deadline == before


def test_decoding_has_no_deadline():
    clock = Clock()
    transfer = _decode_at(D.DECODING, clock)
    clock.now += 1e9
    assert not transfer.overdue()
