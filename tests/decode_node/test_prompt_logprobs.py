"""Logprobs of a prompt on their way to the router."""

from __future__ import annotations

import pytest

from tandem.decode_node.service import PIECE_POSITIONS, _prompt_logprobs
from tandem.shared.engine.plan import PositionLogprobs
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence


@pytest.mark.parametrize("count", [0, 1, PIECE_POSITIONS, 3 * PIECE_POSITIONS + 1])
@pytest.mark.parametrize("split", [False, True])
def test_prompt_logprobs_travel_in_order_and_in_pieces_where_the_router_takes_them(
    split: bool, count: int
) -> None:
    sequence = Sequence(1, [5] * (count + 1), SamplingParams())
    sequence.prompt_logprobs = [PositionLogprobs(i, -1.0, 1, [(i, -1.0)]) for i in range(count)]
    events = list(_prompt_logprobs(sequence, split))
    sizes = [len(event.prompt_logprobs.positions) for event in events]
    tokens = [p.chosen.token for event in events for p in event.prompt_logprobs.positions]
    assert tokens == list(range(count))
    assert len(events) == (max(1, -(-count // PIECE_POSITIONS)) if split else 1)
    assert not split or max(sizes) <= PIECE_POSITIONS
