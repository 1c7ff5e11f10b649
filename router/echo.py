"""``echo`` of text completions: the prompt as the first deltas of each choice."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..proto import tandem_pb2 as pb
from .calls.node_logprobs import piece_tokens
from .generation import ChoiceDelta, GenerationRequest, ScoredToken, new_tokens

PIECE_CHARACTERS = 32 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class _ScoredPiece(Collection[ScoredToken]):
    """Tokens of a prompt, made as they are read: to free an object for each token of a long prompt
    would hold the loop. ``positions[first + i]`` has the logprobs of token i."""

    tokens: array[int]
    offsets: array[int]
    positions: Sequence[pb.PositionLogprobs]
    first: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[ScoredToken]:
        for i, (token, offset) in enumerate(zip(self.tokens, self.offsets, strict=True)):
            at = self.first + i
            yield ScoredToken(token, offset, self.positions[at] if at >= 0 else None)

    def __contains__(self, item: object) -> bool:
        return any(item == each for each in self)


class Echo:
    """One prompt's text, and its logprobs as the node sends them."""

    def __init__(self, request: GenerationRequest, number: int) -> None:
        prompt = request.prompts[number]
        assert prompt.text is not None, "the parser keeps the text of a prompt that is echoed"
        self.text = prompt.text
        self.shown: set[int] = set()
        self._tokens = prompt.tokens
        self._scores = request.logprobs is not None
        self._detokenizer = request.model.tokenizer.detokenizer(
            skip_special_tokens=not prompt.spelled
        )
        self._known = 0
        self._offset = 0
        self._piece_tokens = piece_tokens(request.prompt_alternatives or 0)
        self._pieces: list[_ScoredPiece] = []

    def score(self, positions: Sequence[pb.PositionLogprobs]) -> None:
        """Add the logprobs of the next prompt tokens. The first token has none, since no token
        precedes it."""
        if not self._scores:
            return
        first = 0 if self._known else -1
        last = min(len(positions), first + len(self._tokens) - self._known)
        while first < last:
            count = min(self._piece_tokens, last - first)
            self._pieces.append(self._piece(positions, first, count))
            first += count

    def deltas(self, index: int) -> Iterator[ChoiceDelta]:
        """The prompt in the form of generated output. Call it at most once for each choice."""
        self.shown.add(index)
        if not self._pieces:
            for start in range(0, max(1, len(self.text)), PIECE_CHARACTERS):
                yield ChoiceDelta(index, self.text[start : start + PIECE_CHARACTERS])
            return
        starts = [piece.offsets[0] for piece in self._pieces]
        ends = [*starts[1:], len(self.text)]
        for piece, start, end in zip(self._pieces, starts, ends, strict=True):
            yield ChoiceDelta(index, self.text[start:end], [], piece)

    def _piece(
        self, positions: Sequence[pb.PositionLogprobs], first: int, count: int
    ) -> _ScoredPiece:
        tokens = new_tokens(self._tokens[self._known : self._known + count])
        offsets = array("Q")
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token))
        self._known += count
        return _ScoredPiece(tokens, offsets, positions, first)
