"""The events of a request, as messages to its router."""

from __future__ import annotations

from collections.abc import Iterator

from ..proto import tandem_pb2 as pb
from ..shared.engine.plan import PositionLogprobs
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.telemetry.prefill_origin import LocalReason
from .transfers import PrefillSource

# Positions of a prompt in one event, whose logprobs take the router a few milliseconds to format.
PIECE_POSITIONS = 32

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.COMPUTED: pb.FINISH_REASON_STOP,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.CANCELLED: pb.FINISH_REASON_ERROR,
}


def usage_event(sequence: Sequence, source: PrefillSource) -> pb.GenerateEvent:
    """Report of a prompt that is computed."""
    remote = bool(sequence.received)
    return pb.GenerateEvent(
        usage=pb.Usage(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            remote_tokens=sequence.received,
            remote_cached_tokens=source.cached if remote else 0,
            prefill_node=source.node if remote else "",
            local_reason="" if remote else source.reason or LocalReason.PREEMPTED,
            first_token=source.clock.spent,
        )
    )


def scored_event(output: StepOutput) -> pb.GenerateEvent:
    """Tokens with their logprobs."""
    return pb.GenerateEvent(
        tokens=pb.Tokens(
            index=output.sequence.index,
            tokens=output.tokens,
            logprobs=[_position(item) for item in output.logprobs],
        )
    )


def prompt_logprobs_events(sequence: Sequence) -> Iterator[pb.GenerateEvent]:
    """At least one event. In pieces, other requests proceed in between, here and in the router."""
    found = sequence.prompt_logprobs
    for start in range(0, max(1, len(found)), PIECE_POSITIONS):
        positions = [_position(item) for item in found[start : start + PIECE_POSITIONS]]
        yield pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions))


def finished_event(output: StepOutput) -> pb.GenerateEvent:
    """End of a choice."""
    sequence, scored = output.sequence, output.stop_logprobs
    assert sequence.finish_reason is not None
    return pb.GenerateEvent(
        finished=pb.Finished(
            index=sequence.index,
            reason=_REASONS[sequence.finish_reason],
            stop_token=sequence.stop_token,
            error=sequence.error,
            unfollowable=sequence.unfollowable,
            stop_logprobs=None if scored is None else _position(scored),
        )
    )


def _position(item: PositionLogprobs) -> pb.PositionLogprobs:
    chosen = pb.TokenLogprob(token=item.token, logprob=item.logprob, rank=item.rank)
    return pb.PositionLogprobs(chosen=chosen, packed_top=item.packed_top)
