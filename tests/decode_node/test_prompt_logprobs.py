"""Logprobs of a prompt on their way to the router."""

from __future__ import annotations

import pytest

from tandem.decode_node.events import PIECE_POSITIONS, prompt_logprobs_events
from tandem.proto.packed_logprobs import pack_logprobs
from tandem.router.node_streams.logprobs import alternatives as alternatives_of
from tandem.shared.engine.plan import PositionLogprobs
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Generate


def position(token: int, top: list[tuple[int, float]]) -> PositionLogprobs:
    return PositionLogprobs(token, -1.0, 1, pack_logprobs(top))


@pytest.mark.parametrize("count", [0, 1, 64, 200])
def test_prompt_logprobs_travel_in_order_and_in_pieces(count: int) -> None:
    sequence = Sequence(1, [5] * (count + 1), Generate(SamplingParams(prompt_logprobs=1)))
    sequence.prompt_logprobs = [position(i, [(i, -1.0)]) for i in range(count)]
    events = list(prompt_logprobs_events(sequence))
    positions = [p for event in events for p in event.prompt_logprobs.positions]
    assert [p.chosen.token for p in positions] == list(range(count))
    assert [alternatives_of(p) for p in positions] == [[(i, -1.0)] for i in range(count)]
    assert len(events) == max(1, -(-count // PIECE_POSITIONS))
