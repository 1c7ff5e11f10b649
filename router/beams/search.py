"""Beam search over one prompt, with the rules of transformers.

Each step ranks the best continuations of all beams by the sum of their logprobs. Among the best
``width``, those with an end token are finished; the best ``width`` of the others continue. Finished
beams are ranked by the sum divided by ``length ** length_penalty``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from ...proto import tandem_pb2 as pb
from ...proto.packed_logprobs import ENTRY_BYTES
from ..generation import BeamOptions
from ..node_streams.logprobs import alternatives


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt; ``score`` is the sum of its logprobs."""

    parent: Beam | None = None
    token: int = 0
    score: float = 0.0
    length: int = 0
    logprobs: pb.PositionLogprobs | None = None  # of ``token``

    def chain(self) -> list[Beam]:
        """This beam and its ancestors, one for each token, oldest first."""
        beams: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]

    @property
    def tokens(self) -> list[int]:
        return [beam.token for beam in self.chain()]


class BeamSearch:
    """The state of one search; ``running`` are the beams to continue, best first. Beams keep
    logprobs with ``num_top`` alternatives for each token, or none if it is ``None``."""

    def __init__(
        self, options: BeamOptions, *, min_tokens: int, max_tokens: int, num_top: int | None = None
    ) -> None:
        self.running = [Beam()]
        self._options = options
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._num_top = num_top
        self._finished: list[tuple[float, Beam]] = []

    @property
    def done(self) -> bool:
        """True if there is nothing to continue, or ``early_stopping`` ends the search."""
        if not self.running:
            return True
        if len(self._finished) < self._options.width:
            return False
        return self._options.early_stopping is True or self._bound() <= self._finished[-1][0]

    def advance(self, positions: Sequence[pb.PositionLogprobs]) -> None:
        """Take a step; ``positions`` are the most likely continuations of each running beam."""
        length = self.running[0].length + 1
        candidates = (
            (beam.score + logprob, beam, (token, logprob), position)
            for beam, position in zip(self.running, positions, strict=True)
            for token, logprob in alternatives(position)
            if length > self._min_tokens or token not in self._options.ends
        )
        ranked = [
            self._extended(*candidate)
            for candidate in heapq.nlargest(self._options.ranked, candidates, key=itemgetter(0))
        ]
        full = length >= self._max_tokens
        for beam in ranked[: self._options.width]:
            if full or self.is_end(beam):
                self._finished.append((self._rate(beam.score, length), beam))
        self._finished.sort(key=lambda entry: -entry[0])
        del self._finished[self._options.width :]
        unfinished = [] if full else [beam for beam in ranked if not self.is_end(beam)]
        self.running = unfinished[: self._options.width]

    def best(self, count: int) -> list[Beam]:
        """The best of the finished beams."""
        return [beam for _, beam in self._finished[:count]]

    def is_end(self, beam: Beam) -> bool:
        """True if the beam's last token ends it."""
        return beam.token in self._options.ends

    def _extended(
        self, score: float, beam: Beam, entry: tuple[int, float], position: pb.PositionLogprobs
    ) -> Beam:
        token, logprob = entry
        scored = None
        if self._num_top is not None:
            scored = pb.PositionLogprobs(
                chosen=pb.TokenLogprob(token=token, logprob=logprob),
                packed_top=position.packed_top[: self._num_top * ENTRY_BYTES],
            )
        return Beam(beam, token, score, beam.length + 1, scored)

    def _rate(self, score: float, length: int) -> float:
        rating: float = score / length**self._options.length_penalty
        return rating

    def _bound(self) -> float:
        """A bound, or an estimate, of the rating that running beams can reach."""
        beam = self.running[0]
        longest = self._options.early_stopping == "never" and self._options.length_penalty > 0
        return self._rate(beam.score, self._max_tokens if longest else beam.length)
