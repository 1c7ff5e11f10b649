"""``echo`` of text completions: the prompt as the first delta of each choice."""

from __future__ import annotations

from ..proto import tandem_pb2 as pb
from .generation import Delta, Generation, Scored


class Echo:
    """One prompt's text, and its logprobs once the node has sent them."""

    def __init__(self, generation: Generation, number: int) -> None:
        self._generation = generation
        self._prompt = generation.prompts[number]
        self.positions: list[pb.PositionLogprobs] = []
        self.shown: set[int] = set()
        text = self._prompt.text
        self.text = self._decode() if text is None else text

    def delta(self, index: int) -> Delta:
        """The prompt, as if it had been generated; at most once a choice."""
        self.shown.add(index)
        scored = self._scored() if self._generation.logprobs is not None else []
        return Delta(index, self.text, [], scored)

    def _decode(self) -> str:
        options = self._generation.text
        return self._generation.model.tokenizer.decode(
            self._prompt.tokens, skip_special_tokens=options.skip_special_tokens
        )

    def _scored(self) -> list[Scored]:
        """The first token follows nothing, so it has no logprob."""
        detokenizer = self._generation.model.tokenizer.detokenizer(
            skip_special_tokens=self._generation.text.skip_special_tokens
        )
        scored = []
        offset = 0
        for i, token in enumerate(self._prompt.tokens):
            known = 0 < i <= len(self.positions)
            scored.append(Scored(token, offset, self.positions[i - 1] if known else None))
            offset += len(detokenizer.push(token))
        return scored
