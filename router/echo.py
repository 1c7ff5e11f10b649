"""``echo`` of text completions: the prompt as the first deltas of each choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..proto import tandem_pb2 as pb
from .generation import ChoiceDelta, GenerationRequest, ScoredToken

PIECE_CHARACTERS = 32 * 1024


class Echo:
    """The text of one prompt, and its logprobs as the node sends them. ``echoed`` are the choices
    that have the prompt."""

    def __init__(self, request: GenerationRequest, number: int) -> None:
        prompt = request.prompts[number]
        assert prompt.text is not None, "the parser keeps the text of a prompt that is echoed"
        self.text = prompt.text
        self.echoed: set[int] = set()
        self._tokens = prompt.tokens
        self._scores = request.logprobs is not None
        self._detokenizer = request.model.tokenizer.detokenizer(
            skip_special_tokens=not prompt.spelled
        )
        self._position = 0  # of the next token to score
        self._offset = 0
        self._pieces: list[list[ScoredToken]] = []  # one for each message of the node

    def score(self, positions: Sequence[pb.PositionLogprobs]) -> None:
        """Add the logprobs of the next prompt tokens. The first token of a prompt has none."""
        if not self._scores:
            return
        scores = list(positions) if self._position else [None, *positions]
        tokens = self._tokens[self._position : self._position + len(scores)]
        piece = [
            self._score_token(token, score) for token, score in zip(tokens, scores, strict=False)
        ]
        if piece:
            self._pieces.append(piece)
            self._position += len(piece)

    def deltas(self, index: int) -> Iterator[ChoiceDelta]:
        """The prompt as deltas of a choice. Call at most once for each choice."""
        self.echoed.add(index)
        if not self._pieces:
            for start in range(0, max(1, len(self.text)), PIECE_CHARACTERS):
                yield ChoiceDelta(index, self.text[start : start + PIECE_CHARACTERS])
            return
        starts = [piece[0].offset for piece in self._pieces]
        ends = [*starts[1:], len(self.text)]
        for piece, start, end in zip(self._pieces, starts, ends, strict=True):
            yield ChoiceDelta(index, self.text[start:end], [], piece)

    def _score_token(self, token: int, score: pb.PositionLogprobs | None) -> ScoredToken:
        scored = ScoredToken(token, self._offset, score)
        self._offset += len(self._detokenizer.push(token))
        return scored
