"""The events of a request, as messages to its router."""

from __future__ import annotations

from collections.abc import Iterator

from ..proto import tandem_pb2 as pb
from ..shared.engine.plan import PositionLogprobs
from ..shared.engine.sequence import FinishReason, Sequence, StepOutput
from ..shared.telemetry.prefill_origin import LocalReason
from .transfers import PrefillSource

# Prompt positions in one event; formatting their logprobs takes the router a few milliseconds.
PIECE_POSITIONS = 32

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.COMPUTED: pb.FINISH_REASON_STOP,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.CANCELLED: pb.FINISH_REASON_ERROR,
}


def usage_event(sequence: Sequence, source: PrefillSource) -> pb.GenerateEvent:
    """Usage of a prompt, sent once it is computed."""
    remote = bool(sequence.received)
    return pb.GenerateEvent(
        usage=pb.Usage(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            remote_tokens=sequence.received,
            remote_cached_tokens=source.cached if remote else 0,
            prefill_node=source.node if remote else "",
            local_reason="" if remote else source.reason or LocalReason.PREEMPTED,
            first_token=source.clock.durations,
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
    """The prompt's logprobs, in at least one event. Other requests proceed between the pieces, here
    and in the router."""
    logprobs = sequence.prompt_logprobs
    for start in range(0, max(1, len(logprobs)), PIECE_POSITIONS):
        positions = [_position(item) for item in logprobs[start : start + PIECE_POSITIONS]]
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
    token = pb.TokenLogprob(token=item.token, logprob=item.logprob, rank=item.rank)
    return pb.PositionLogprobs(chosen=token, packed_top=item.packed_top)
