"""Beam search: which beams it keeps, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.packed_logprobs import pack_logprobs
from tandem.router.beams.search import BeamSearch
from tandem.router.generation import BeamOptions, EarlyStopping

END = 0


def position(**logprobs: float) -> pb.PositionLogprobs:
    """Logprobs of continuations; ``t1`` is token 1, and so on."""
    entries = [(int(name[1:]), logprob) for name, logprob in logprobs.items()]
    return pb.PositionLogprobs(packed_top=pack_logprobs(entries))


def options(width: int = 2, **changes: Any) -> BeamOptions:
    fields: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
    return BeamOptions(width=width, ends=frozenset({END}), **(fields | changes))


def test_a_worse_beginning_may_win() -> None:
    search = BeamSearch(options(), min_tokens=0, max_tokens=2)
    search.advance([position(t1=-0.5, t2=-1.0)])
    search.advance([position(t3=-2.0, t4=-2.1), position(t5=-0.1, t6=-3.0)])
    assert search.done
    assert [beam.tokens for beam in search.best(2)] == [[2, 5], [1, 3]]
    assert [beam.score for beam in search.best(1)] == pytest.approx([-1.1])


def test_only_ends_among_the_best_finish() -> None:
    search = BeamSearch(options(), min_tokens=0, max_tokens=9)
    search.advance([position(t1=-0.5, t2=-1.0, t0=-1.5)])
    assert [beam.tokens for beam in search.running] == [[1], [2]]
    search.advance([position(t0=-0.1, t3=-4.0), position(t4=-0.2, t0=-5.0)])
    assert [beam.tokens for beam in search.best(2)] == [[1, END]]
    assert [beam.tokens for beam in search.running] == [[2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "done"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True)],
)
def test_a_search_ends_when_it_cannot_or_need_not_get_better(
    early_stopping: EarlyStopping, penalty: float, done: bool
) -> None:
    beam_options = options(1, early_stopping=early_stopping, length_penalty=penalty)
    search = BeamSearch(beam_options, min_tokens=0, max_tokens=9)
    search.advance([position(t0=-0.5, t1=-0.6)])
    assert search.done == done


def test_ends_wait_for_the_fewest_tokens_and_long_beams_are_cut_off() -> None:
    search = BeamSearch(options(1), min_tokens=1, max_tokens=2)
    search.advance([position(t0=-0.1, t1=-3.0)])
    assert [beam.tokens for beam in search.running] == [[1]] and not search.done
    search.advance([position(t2=-0.1, t0=-3.0)])
    assert search.done and search.best(1)[0].tokens == [1, 2]
    assert not search.is_end(search.best(1)[0])


def test_a_length_penalty_favours_long_or_short_beams() -> None:
    widths = []
    for penalty in (0.0, 2.0):
        search = BeamSearch(options(length_penalty=penalty), min_tokens=0, max_tokens=2)
        search.advance([position(t0=-1.0, t1=-1.1)])
        search.advance([position(t2=-0.5, t3=-9.0)])
        widths.append(search.best(1)[0].tokens)
    assert widths == [[END], [1, 2]]
