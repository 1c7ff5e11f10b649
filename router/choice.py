"""One choice of a request: turns its tokens into deltas until the node or a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import tandem_pb2 as pb
from ..shared.text.output import Deltas, OutputText, TextDelta, join_deltas
from ..shared.text.output_parser import call_markers, marker_tokens, output_parser
from .errors import unfollowable
from .generation import ChoiceDelta, GenerationRequest, ScoredToken, new_tokens

REASONS: dict[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ERROR: "error",
}


class ChoiceStream:
    """The output of one choice, owned by its ``PromptOutputs``. A ``finished`` choice accepts no
    more tokens. If its node fails, another node continues from ``token_ids``."""

    def __init__(self, request: GenerationRequest, index: int, prompt_characters: int) -> None:
        options = request.text
        tokenizer = request.model.tokenizer
        markers = call_markers(options.tools, tokenizer.texts)
        self.index = index
        self.finished = False
        self.token_ids = new_tokens()
        self._text = OutputText(
            tokenizer.detokenizer(
                skip_special_tokens=options.skip_special_tokens,
                keep=marker_tokens(options.reasoning_parser, options.tools),
            ),
            options.stop,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
            parser=output_parser(
                options.reasoning_parser,
                options.tools,
                opened=options.reasoning_opened,
                calls=markers,
            ),
            calls=markers,
        )
        self._has_tool_calls = False
        self._discard = options.discard_output
        self._first_offset = prompt_characters
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._constraint = request.sampling.structured_outputs.param

    @property
    def has_output(self) -> bool:
        """True once the node has sent output for this choice."""
        return bool(self.token_ids) or self.finished

    @property
    def tokens(self) -> int:
        return self._text.tokens

    @property
    def reasoning_tokens(self) -> int:
        return self._text.reasoning_tokens

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[pb.PositionLogprobs]
    ) -> list[ChoiceDelta]:
        """Add the next tokens, up to the one that completes a stop string.

        No-op once the choice has finished: the node may have generated past the stop string.
        """
        if self._discard or self.finished:
            return []
        self.token_ids.extend(tokens)
        if len(tokens) == 1 and not logprobs:
            return self._deltas(self._text.push(tokens[0]), tokens, ())
        texts: list[TextDelta] = []
        delta_tokens = []
        scored = []
        for i, token in enumerate(tokens):
            delta_tokens.append(token)
            if logprobs:
                offset = self._first_offset + self._text.characters
                scored.append(ScoredToken(token, offset, logprobs[i]))
            texts += self._text.push(token)
            if self._text.stopped_by is not None:
                break
        return self._deltas(texts, delta_tokens, scored)

    def finish(self, finished: pb.Finished) -> list[ChoiceDelta]:
        """Finish the choice for the node's reason and flush the text that was held back, unless
        that completes a stop string. The stop token is part of the last delta, as in vLLM."""
        if self.finished:
            return []
        if self._discard:
            self.finished = True
            return [ChoiceDelta(self.index, finish_reason="length")]
        stop_tokens = [finished.stop_token] if finished.HasField("stop_token") else []
        offset = self._first_offset + self._text.characters
        texts = self._text.finish(*stop_tokens)
        scored = []
        if stop_tokens and finished.HasField("stop_logprobs"):
            scored.append(ScoredToken(stop_tokens[0], offset, finished.stop_logprobs))
        reason = REASONS.get(finished.reason, "stop")
        stop_id = next((token for token in stop_tokens if token in self._stop_ids), None)
        deltas = self._deltas(texts, stop_tokens, scored, reason, stop_id)
        if deltas[-1].finish_reason == "error":
            deltas[-1].error = unfollowable(finished.error, self._constraint)
        return deltas

    def _deltas(
        self,
        texts: Deltas,
        tokens: Sequence[int],
        scored: Sequence[ScoredToken],
        reason: str | None = None,
        stop_id: int | None = None,
    ) -> list[ChoiceDelta]:
        """One delta, unless text follows a tool call; the last delta has the tokens and the finish
        reason. A stop string overrides the node's reason."""
        if reason is None and len(texts) == 1 and self._text.stopped_by is None:
            (text,) = texts
            self._has_tool_calls = self._has_tool_calls or bool(text.calls)
            return [
                ChoiceDelta(
                    self.index, text.content, tokens, scored, None, None, text.reasoning, text.calls
                )
            ]
        *before, text = texts if len(texts) == 1 else join_deltas(texts) or [TextDelta()]
        self._has_tool_calls = self._has_tool_calls or any(each.calls for each in (*before, text))
        stopped_by: str | int | None = stop_id
        if self._text.stopped_by is not None:
            reason, stopped_by = "stop", self._text.stopped_by
        if reason == "stop" and self._has_tool_calls:
            reason = "tool_calls"
        self.finished = reason is not None
        deltas = [
            ChoiceDelta(self.index, each.content, reasoning=each.reasoning, calls=each.calls)
            for each in before
        ]
        last = ChoiceDelta(
            self.index, text.content, tokens, scored, reason, stopped_by, text.reasoning, text.calls
        )
        return [*deltas, last]
