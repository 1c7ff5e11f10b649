"""The text of one choice, from its tokens."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import UNFOLLOWABLE, RequestError, UnavailableError
from ...text.output import Deltas, OutputText
from ...text.tokenizer import Tokenizer
from ..plan import PositionLogprobs
from ..sequence import FinishReason, Sequence, StepOutput
from .types import Completion, Delta


class SequenceText:
    """Turns the tokens of a sequence into deltas until the model or a stop string ends it."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = sequence.generation.params
        self.sequence = sequence
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._output = OutputText(
            tokenizer.detokenizer(),
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[PositionLogprobs] = []

    def push(self, output: StepOutput) -> Iterator[Delta]:
        """The deltas of one step; none once a stop string has ended the choice.

        Raises ``UnavailableError`` if the sequence failed, and ``RequestError`` if it could not
        follow its grammar.
        """
        if self.finish_reason is not None:
            return
        if output.finish_reason is FinishReason.ERROR:
            if output.sequence.unfollowable:
                raise RequestError(f"{output.sequence.error}.", code=UNFOLLOWABLE)
            raise UnavailableError(f"the generation failed: {output.sequence.error}")
        for position, token in enumerate(output.tokens):
            text = self._output.push(token)
            yield self._delta(text, [token], output.logprobs[position : position + 1])
            if self.finish_reason is not None:
                return
        if output.finish_reason is not None:
            yield self._end(output)

    def completion(self, leader: Sequence) -> Completion:
        """The whole choice, once it has ended."""
        assert self.finish_reason is not None
        return Completion(
            index=self.sequence.index,
            text="".join(self._text),
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_tokens=len(leader.prompt),
            cached_tokens=leader.cached,
            prompt_logprobs=leader.prompt_logprobs,
        )

    def _end(self, output: StepOutput) -> Delta:
        """Release the text that was held back, unless it completes a stop string."""
        sequence = self.sequence
        ended_by = [] if sequence.stop_token is None else [sequence.stop_token]
        text = self._output.finish(*ended_by)
        length = sequence.finish_reason is FinishReason.LENGTH
        self.finish_reason = "length" if length else "stop"
        if sequence.stop_token in sequence.generation.params.stop_token_ids:
            self._stop_reason = sequence.stop_token
        scored = [] if output.stop_logprobs is None else [output.stop_logprobs]
        return self._delta(text, ended_by, scored)

    def _delta(self, new: Deltas, tokens: list[int], logprobs: list[PositionLogprobs]) -> Delta:
        """A stop string overrides the sequence's own reason."""
        text = "".join([delta.content for delta in new])
        if self._output.stopped_by is not None:
            self.finish_reason, self._stop_reason = "stop", self._output.stopped_by
        self._text.append(text)
        self._tokens += tokens
        self._logprobs += logprobs
        return Delta(
            index=self.sequence.index,
            text=text,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
