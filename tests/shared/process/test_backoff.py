"""Pauses: with jitter between a process's own attempts, without it for backoff from a peer."""

from __future__ import annotations

from tandem.shared.process.backoff import MAX_PAUSE_SECONDS, Backoff, PeerBackoff
from tandem.tests.support.clock import SteppedClock


def test_an_avoidance_doubles_its_pauses_until_the_thing_works() -> None:
    clock = SteppedClock()
    avoidance = PeerBackoff(clock)
    assert not avoidance.suspected and avoidance.remaining == 0
    pauses = []
    for _ in range(7):
        pauses.append(avoidance.begin())
        assert avoidance.begin() == 0, "a second failure during the pause counts"
        assert avoidance.suspected and avoidance.remaining == pauses[-1]
        clock.now += pauses[-1]
        assert avoidance.suspected and avoidance.remaining == 0
    assert pauses == [1, 2, 4, 8, 16, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    avoidance.end()
    avoidance.end()
    assert not avoidance.suspected
    assert avoidance.begin() == 1


def test_the_end_of_an_avoidance_ends_a_pause_that_lasts() -> None:
    avoidance = PeerBackoff(SteppedClock())
    avoidance.begin()
    avoidance.end()
    assert avoidance.remaining == 0


def test_a_backoff_is_half_to_all_of_the_doubled_pause_up_to_its_limit() -> None:
    backoff = Backoff(1.0, 8.0)
    for longest in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert longest / 2 <= backoff.pause() <= longest
    backoff.reset()
    assert backoff.pause() <= 1.0
