"""The text of one choice: its tokens are detokenized until a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import tandem_pb2 as pb
from ..shared.text.stop import StopMatcher
from .generation import ChoiceDelta, GenerationRequest, ScoredToken

REASONS: dict[int, str] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class ChoiceText:
    """Owned by the attempt of its prompt. A ``finished`` choice takes no more tokens."""

    def __init__(self, request: GenerationRequest, index: int, prompt_characters: int) -> None:
        options = request.text
        tokenizer = request.model.tokenizer
        self.index = index
        self.finished = False
        self.tokens = 0
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._include_stop = options.include_stop
        self._stops = StopMatcher(options.stop, include=options.include_stop)
        self._min_tokens = options.min_tokens
        self._discard = options.discard_output
        self._offset = prompt_characters
        self._stop_ids = frozenset(request.sampling.stop_token_ids)

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[pb.PositionLogprobs]
    ) -> ChoiceDelta | None:
        """Add the next tokens, up to the one that completes a stop string.

        ``None`` once the choice has finished: the node may be ahead of the stop string.
        """
        if self._discard or self.finished:
            return None
        text = []
        taken = []
        scored = []
        for i, token in enumerate(tokens):
            taken.append(token)
            if logprobs:
                scored.append(ScoredToken(token, self._offset, logprobs[i]))
            text.append(self._visible(self._detokenizer.push(token)))
            self.tokens += 1
            if self._stops.matched is not None:
                return self._stop("".join(text), taken, scored)
        return ChoiceDelta(self.index, "".join(text), taken, scored)

    def finish(self, finished: pb.Finished) -> ChoiceDelta | None:
        """Finish the choice as the node has, with the text that was held back, unless that
        completes a stop string.

        The token that ended it is not among those streamed; it counts and is listed, as in vLLM,
        and its text is included if stop strings are.
        """
        if self.finished:
            return None
        if self._discard:
            return self._close(ChoiceDelta(self.index, finish_reason="length"))
        ended_by = [finished.stop_token] if finished.HasField("stop_token") else []
        self.tokens += len(ended_by)
        included = [self._detokenizer.push(token) for token in ended_by if self._include_stop]
        text = self._visible("".join((*included, self._detokenizer.flush())))
        if self._stops.matched is not None:
            return self._stop(text, ended_by, [])
        text += self._stops.flush()
        reason = REASONS.get(finished.reason, "stop")
        stop_id = next((token for token in ended_by if token in self._stop_ids), None)
        return self._close(ChoiceDelta(self.index, text, ended_by, [], reason, stop_id))

    def _visible(self, text: str) -> str:
        """The part of new text, and of held-back text, that cannot be part of a stop string."""
        self._offset += len(text)
        # As in vLLM, stop strings do not count before min_tokens.
        return self._stops.push(text) if self.tokens + 1 > self._min_tokens else text

    def _stop(self, text: str, tokens: list[int], scored: list[ScoredToken]) -> ChoiceDelta:
        delta = ChoiceDelta(self.index, text, tokens, scored, "stop", self._stops.matched)
        return self._close(delta)

    def _close(self, delta: ChoiceDelta) -> ChoiceDelta:
        self.finished = True
        return delta
