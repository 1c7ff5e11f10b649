"""The dataset ``random``: prompts and outputs of given lengths, with an optional common prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor
from random import Random
from typing import Any

from .planned_request import PlannedRequest
from .random_prompts import PromptMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Tokens of prompts and outputs; a ratio r draws them from length x (1 - r) to x (1 + r). The
    common prefix is added to that."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def draw(self, random: Random, length: int) -> int:
        low, high = length * (1 - self.range_ratio), length * (1 + self.range_ratio)
        return max(1, random.randint(floor(low), ceil(high)))


def random_requests(
    maker: PromptMaker, lengths: RandomLengths, count: int, seed: int
) -> Iterator[PlannedRequest]:
    """The same requests for the same seed."""
    random = Random(seed)
    prefix: Any = None
    if lengths.prefix_len:
        prefix = maker.make(Random(f"prefix {seed}"), lengths.prefix_len)
    for _ in range(count):
        size = lengths.draw(random, lengths.input_len)
        own: Any = maker.make(random, size)
        if prefix is not None:
            own = f"{prefix} {own}" if isinstance(own, str) else prefix + own
        output = lengths.draw(random, lengths.output_len)
        yield PlannedRequest(own, lengths.prefix_len + size, output)
