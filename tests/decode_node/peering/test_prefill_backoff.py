"""Backoff from a prefill node grows with each failure, and ends when the node works again."""

from __future__ import annotations

import pytest

from tandem.decode_node.peering.prefill_backoff import MAX_ADDRESSES, PrefillBackoff
from tandem.shared.errors import TransferError
from tandem.shared.process.backoff import MAX_PAUSE_SECONDS
from tandem.tests.support.clock import SteppedClock


def pause(prefill_backoff: PrefillBackoff, clock: SteppedClock) -> float:
    """Seconds until the node may be contacted again."""
    start = clock.now
    while True:
        try:
            prefill_backoff.check("a:1", 7)
            return clock.now - start
        except TransferError:
            clock.now += 0.5


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    clock = SteppedClock()
    prefill_backoff = PrefillBackoff(clock)
    pauses = []
    for _ in range(7):
        prefill_backoff.add("a:1", 7, "silent")
        prefill_backoff.add("a:1", 7, "silent")  # another request that waited with the first
        pauses.append(pause(prefill_backoff, clock))
    assert pauses == [1, 2, 4, 8, 16, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    prefill_backoff.end("a:1")
    prefill_backoff.end("a:1")
    prefill_backoff.add("a:1", 7, "silent")
    assert pause(prefill_backoff, clock) == 1


def test_a_backoff_is_for_one_start_at_one_address_and_has_a_reason() -> None:
    prefill_backoff = PrefillBackoff(SteppedClock())
    prefill_backoff.add("a:1", 7, "gives no sign of life")
    with pytest.raises(TransferError, match=r"a:1 is not contacted for another 1 s: gives no sign"):
        prefill_backoff.check("a:1", 7)
    prefill_backoff.check("a:1", 8)
    prefill_backoff.check("b:1", 7)


def test_their_number_is_bounded() -> None:
    prefill_backoff = PrefillBackoff(SteppedClock())
    for number in range(MAX_ADDRESSES + 1):
        prefill_backoff.add(f"a:{number}", 7, "silent")
    prefill_backoff.check("a:0", 7)
    with pytest.raises(TransferError):
        prefill_backoff.check("a:1", 7)
