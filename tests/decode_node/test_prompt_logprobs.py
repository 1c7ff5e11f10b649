"""Logprobs of a prompt on their way to the router, and the bound on those of all requests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tandem.decode_node.events import PIECE_LOGPROBS, prompt_logprobs_events, scored_event
from tandem.decode_node.wide_logprobs import MOST_LOGPROBS, check_logprobs
from tandem.proto import tandem_pb2 as pb
from tandem.proto.packed_logprobs import pack_logprobs
from tandem.router.calls.node_logprobs import alternatives as alternatives_of
from tandem.shared.engine.messages import CODEC, StepDone
from tandem.shared.engine.plan import PositionLogprobs, Sampled, StepResult
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence, StepOutput
from tandem.shared.engine.work import Generate
from tandem.shared.errors import OverloadedError, RequestError


def found(token: int, top: list[tuple[int, float]]) -> PositionLogprobs:
    return PositionLogprobs(token, -1.0, 1, pack_logprobs(top))


def calls_of(work: Callable[[], object]) -> int:
    """The functions that are called meanwhile, also those in C."""
    calls = 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # whose callbacks, of hypothesis for one, would be counted
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_head_does_as_much_for_one_alternative_as_for_a_vocabulary() -> None:
    """Its loop would be held for a second, and its router would drop it for silence."""

    def pass_on(alternatives: int) -> None:
        top = [(i, -1.0) for i in range(alternatives)]
        listed = found(1, top)
        sampled = Sampled(1, [1], [listed])
        data = CODEC.encode(StepDone(StepResult(1, [sampled], {1: [listed]}), None, 1, 1))

        def work() -> None:
            message = CODEC.decode(data)
            assert isinstance(message, StepDone) and message.result is not None
            sequence = Sequence(1, [5, 6], Generate(SamplingParams(logprobs=1, prompt_logprobs=1)))
            sequence.prompt_logprobs = message.result.prompt_logprobs[1]
            output = StepOutput(sequence, [1], logprobs=message.result.sampled[0].logprobs)
            events = [*prompt_logprobs_events(sequence, True, True), scored_event(output, True)]
            assert (
                len(b"".join(map(pb.GenerateEvent.SerializeToString, events))) > 16 * alternatives
            )

        counts[alternatives] = calls_of(work)

    counts: dict[int, int] = {}
    pass_on(1)
    pass_on(50_000)
    assert counts[50_000] <= counts[1]


@pytest.mark.parametrize("count", [0, 1, 64, 200])
@pytest.mark.parametrize("alternatives", [20, 5000])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_prompt_logprobs_travel_in_order_and_in_pieces_where_the_router_takes_them(
    packed: bool, split: bool, alternatives: int, count: int
) -> None:
    params = SamplingParams(prompt_logprobs=alternatives)
    sequence = Sequence(1, [5] * (count + 1), Generate(params))
    sequence.prompt_logprobs = [found(i, [(i, -1.0)]) for i in range(count)]
    events = list(prompt_logprobs_events(sequence, split, packed))
    positions = [p for event in events for p in event.prompt_logprobs.positions]
    assert [p.chosen.token for p in positions] == list(range(count))
    assert [alternatives_of(p) for p in positions] == [[(i, -1.0)] for i in range(count)]
    assert all(bool(p.packed_top) == packed and bool(p.top) != packed for p in positions)
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
