"""The watchdog: ranks that reply to pings but no longer compute."""

from __future__ import annotations

from tandem.shared.engine.watchdog import MAX_STUCK, MAX_STUCK_FIRST, PATIENCE, Watchdog


def reply(watchdog: Watchdog, layers: int, times: int) -> None:
    for _ in range(times):
        watchdog.note_pong(layers)


def proven(longest: int = 0) -> Watchdog:
    """After a step whose slowest layer took ``longest`` replies."""
    watchdog = Watchdog()
    watchdog.begin()
    reply(watchdog, 1, 1 + longest)
    watchdog.end()
    return watchdog


def test_between_steps_nothing_is_computed_and_nothing_wrong() -> None:
    watchdog = proven()
    reply(watchdog, 1, 10 * MAX_STUCK_FIRST)
    assert not watchdog.stuck
    watchdog.begin()
    assert not watchdog.stuck


def test_a_step_that_computes_no_layer_is_noticed() -> None:
    watchdog = proven()
    watchdog.begin()
    reply(watchdog, 1, MAX_STUCK - 1)
    assert not watchdog.stuck
    reply(watchdog, 1, 1)
    assert watchdog.stuck == MAX_STUCK


def test_a_long_step_is_well_as_long_as_layers_come() -> None:
    watchdog = proven()
    watchdog.begin()
    for layer in range(2, 200):
        reply(watchdog, layer, MAX_STUCK)
        assert not watchdog.stuck


def test_a_rank_may_take_many_times_as_long_as_before() -> None:
    slow = MAX_STUCK - 1
    watchdog = proven(slow)
    watchdog.begin()
    reply(watchdog, 1, PATIENCE * slow - 1)
    assert not watchdog.stuck
    reply(watchdog, 1, 1)
    assert watchdog.stuck


def test_the_second_of_two_steps_is_watched_after_the_first() -> None:
    watchdog = proven()
    watchdog.begin()
    reply(watchdog, 1, MAX_STUCK - 1)
    watchdog.begin()  # which computes no layer of the first
    assert not watchdog.stuck
    reply(watchdog, 1, 1)
    assert watchdog.stuck == MAX_STUCK
    watchdog.end()
    assert not watchdog.stuck
    reply(watchdog, 1, PATIENCE * MAX_STUCK)
    assert watchdog.stuck
    watchdog.end()
    assert not watchdog.stuck
    reply(watchdog, 1, 2 * PATIENCE * PATIENCE * MAX_STUCK)
    assert not watchdog.stuck


def test_a_replay_whose_layers_come_at_once_may_take_as_long_as_one_layer() -> None:
    watchdog = proven()
    watchdog.begin()
    reply(watchdog, 29, MAX_STUCK)
    assert not watchdog.stuck
    reply(watchdog, 29, 1)
    assert watchdog.stuck == MAX_STUCK
    watchdog.end()
    watchdog.begin()
    reply(watchdog, 57, PATIENCE * MAX_STUCK)
    assert not watchdog.stuck
    reply(watchdog, 57, 1)
    assert watchdog.stuck


def test_the_first_step_may_compile() -> None:
    watchdog = Watchdog()
    watchdog.begin()
    reply(watchdog, 0, MAX_STUCK_FIRST - 1)
    assert not watchdog.stuck
    reply(watchdog, 0, 1)
    assert watchdog.stuck == MAX_STUCK_FIRST
