"""A node that cost a request seconds is left alone, for longer each time, until it works again."""

from __future__ import annotations

import pytest

from tandem.decode_node.absences import MAX_ABSENCES, Absences
from tandem.shared.backoff import LONGEST_PAUSE_SECONDS
from tandem.shared.errors import TransferError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pause(absences: Absences, clock: Clock) -> float:
    """Seconds until the node may be asked again."""
    begun = clock.now
    while True:
        try:
            absences.check("a:1", 7)
            return clock.now - begun
        except TransferError:
            clock.now += 0.5


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    clock = Clock()
    absences = Absences(clock)
    pauses = []
    for _ in range(7):
        absences.add("a:1", 7, "silent")
        absences.add("a:1", 7, "silent")  # another request that waited with the first
        pauses.append(pause(absences, clock))
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    absences.end("a:1")
    absences.end("a:1")
    absences.add("a:1", 7, "silent")
    assert pause(absences, clock) == 1


def test_an_absence_is_of_one_start_of_one_address_and_says_why() -> None:
    absences = Absences(Clock())
    absences.add("a:1", 7, "gives no sign of life")
    with pytest.raises(TransferError, match=r"a:1 is left alone for 1.0 s: gives no sign of life"):
        absences.check("a:1", 7)
    absences.check("a:1", 8)
    absences.check("b:1", 7)


def test_their_number_is_bounded() -> None:
    absences = Absences(Clock())
    for number in range(MAX_ABSENCES + 1):
        absences.add(f"a:{number}", 7, "silent")
    absences.check("a:0", 7)
    with pytest.raises(TransferError):
        absences.check("a:1", 7)
