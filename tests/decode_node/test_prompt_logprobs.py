"""Logprobs of a prompt on their way to the router, and the bound on those of all requests."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.decode_node.events import PIECE_LOGPROBS, prompt_logprobs_events
from tandem.decode_node.wide_logprobs import MOST_LOGPROBS, check_logprobs
from tandem.proto import tandem_pb2 as pb
from tandem.shared.engine.plan import PositionLogprobs
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence
from tandem.shared.errors import OverloadedError, RequestError


@pytest.mark.parametrize("count", [0, 1, 64, 200])
@pytest.mark.parametrize("alternatives", [20, 5000])
@pytest.mark.parametrize("split", [False, True])
def test_prompt_logprobs_travel_in_order_and_in_pieces_where_the_router_takes_them(
    split: bool, alternatives: int, count: int
) -> None:
    params = SamplingParams(prompt_logprobs=alternatives)
    sequence = Sequence(1, [5] * (count + 1), params)
    sequence.prompt_logprobs = [PositionLogprobs(i, -1.0, 1, [(i, -1.0)]) for i in range(count)]
    events = list(prompt_logprobs_events(sequence, split))
    tokens = [p.chosen.token for event in events for p in event.prompt_logprobs.positions]
    assert tokens == list(range(count))
    piece = 1 if alternatives > PIECE_LOGPROBS else 64
    assert len(events) == (max(1, -(-count // piece)) if split else 1)


def test_requests_with_many_alternatives_share_a_bound() -> None:
    def asking(**sampling: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(prompt=[1] * 10, sampling=pb.Sampling(**sampling))

    third = asking(logprobs=MOST_LOGPROBS // 6, n=2)
    narrow = asking(logprobs=20, prompt_logprobs=20, n=128)
    check_logprobs(third, [third, narrow, narrow])
    check_logprobs(narrow, [third] * 4)
    with pytest.raises(OverloadedError):
        check_logprobs(third, [third] * 3)
    with pytest.raises(RequestError, match="asks for 2300000 logprobs at once"):
        check_logprobs(asking(prompt_logprobs=230_000), [])
