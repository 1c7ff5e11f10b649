"""One choice of a request: its tokens become text, until a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import tandem_pb2 as pb
from ..shared.text.stop import StopMatcher
from .generation import Delta, Generation, Scored

REASONS: dict[int, str] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Choice:
    """Owned by the request that it belongs to; ``finished`` choices take no more tokens."""

    def __init__(self, generation: Generation, index: int, prompt_characters: int) -> None:
        options = generation.text
        tokenizer = generation.model.tokenizer
        self.index = index
        self.finished = False
        self.tokens = 0
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._include_stop = options.include_stop
        self._stops = StopMatcher(options.stop, include=options.include_stop)
        self._min_tokens = options.min_tokens
        self._discard = options.discard_output
        self._offset = prompt_characters
        self._stop_ids = frozenset(generation.sampling.stop_token_ids)

    def push(self, tokens: Sequence[int], logprobs: Sequence[pb.PositionLogprobs]) -> Delta | None:
        """Take the next tokens; ends at the one that completes a stop string.

        Nothing for a choice that has finished: the node may be ahead of the stop string.
        """
        if self._discard or self.finished:
            return None
        text = []
        taken = []
        scored = []
        for i, token in enumerate(tokens):
            taken.append(token)
            if logprobs:
                scored.append(Scored(token, self._offset, logprobs[i]))
            text.append(self._show(self._detokenizer.push(token)))
            self.tokens += 1
            if self._stops.matched is not None:
                return self._end("".join(text), taken, scored)
        return Delta(self.index, "".join(text), taken, scored)

    def finish(self, finished: pb.Finished) -> Delta | None:
        """The node has ended it: what was held back comes out, unless it completes a stop string.

        The token that ended it is not among those streamed; it counts, and is listed, as in vLLM,
        and is text where stop strings are.
        """
        if self.finished:
            return None
        if self._discard:
            return self._close(Delta(self.index, finish_reason="length"))
        ended_by = [finished.stop_token] if finished.HasField("stop_token") else []
        self.tokens += len(ended_by)
        included = [self._detokenizer.push(token) for token in ended_by if self._include_stop]
        text = self._show("".join((*included, self._detokenizer.flush())))
        if self._stops.matched is not None:
            return self._end(text, ended_by, [])
        text += self._stops.flush()
        reason = REASONS.get(finished.reason, "stop")
        stop_id = next((token for token in ended_by if token in self._stop_ids), None)
        return self._close(Delta(self.index, text, ended_by, [], reason, stop_id))

    def _show(self, text: str) -> str:
        self._offset += len(text)
        # As in vLLM, stop strings do not count before min_tokens.
        return self._stops.push(text) if self.tokens + 1 > self._min_tokens else text

    def _end(self, text: str, tokens: list[int], scored: list[Scored]) -> Delta:
        delta = Delta(self.index, text, tokens, scored, "stop", self._stops.matched)
        return self._close(delta)

    def _close(self, delta: Delta) -> Delta:
        self.finished = True
        return delta
