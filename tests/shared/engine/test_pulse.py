"""When a rank that answers stands still all the same."""

from __future__ import annotations

from tandem.shared.engine.pulse import MAX_STILL, MAX_STILL_FIRST, PATIENCE, Pulse


def answer(pulse: Pulse, layers: int, times: int) -> None:
    for _ in range(times):
        pulse.answered(layers)


def proven(longest: int = 0) -> Pulse:
    """After a step whose slowest layer took ``longest`` answers."""
    pulse = Pulse()
    pulse.begin()
    answer(pulse, 1, 1 + longest)
    pulse.end()
    return pulse


def test_between_steps_nothing_is_computed_and_nothing_wrong() -> None:
    pulse = proven()
    answer(pulse, 1, 10 * MAX_STILL_FIRST)
    assert not pulse.still
    pulse.begin()
    assert not pulse.still


def test_a_step_that_computes_no_layer_is_noticed() -> None:
    pulse = proven()
    pulse.begin()
    answer(pulse, 1, MAX_STILL - 1)
    assert not pulse.still
    answer(pulse, 1, 1)
    assert pulse.still == MAX_STILL


def test_a_long_step_is_well_as_long_as_layers_come() -> None:
    pulse = proven()
    pulse.begin()
    for layer in range(2, 200):
        answer(pulse, layer, MAX_STILL)
        assert not pulse.still


def test_a_rank_may_be_as_slow_as_it_was_before_many_times_over() -> None:
    slow = MAX_STILL - 1
    pulse = proven(slow)
    pulse.begin()
    answer(pulse, 1, PATIENCE * slow - 1)
    assert not pulse.still
    answer(pulse, 1, 1)
    assert pulse.still


def test_the_first_step_may_compile() -> None:
    pulse = Pulse()
    pulse.begin()
    answer(pulse, 0, MAX_STILL_FIRST - 1)
    assert not pulse.still
    answer(pulse, 0, 1)
    assert pulse.still == MAX_STILL_FIRST
