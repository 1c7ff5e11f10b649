"""Counters of the engine's work, and the measured rate of prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from .plan import NOT_FINITE, StepResult
from .scheduling.prefill_pacer import MIN_CHUNK
from .scheduling.step_budget import StepCounts

# Buckets of the histogram of a step's tokens, as in vLLM.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Weight of the newest measurement in the running mean.
_NEWEST = 0.3


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. ``cache_queries`` are prompt tokens looked up in the prefix index.
    ``step_tokens`` counts steps by the bucket of their tokens."""

    steps: int = 0
    step_seconds: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    failed_steps: Counter[str] = field(default_factory=Counter)
    failed_sequences: Counter[str] = field(default_factory=Counter)

    def step(self, result: StepResult, counts: StepCounts) -> None:
        self.steps += 1
        self.step_seconds += result.seconds
        generated = sum(map(len, result.sampled.values()))
        self.generated_tokens += generated
        self.prompt_tokens += counts.prompt
        self.step_tokens[bisect_left(STEP_TOKENS, counts.prompt + generated)] += 1
        self.failed_sequences[NOT_FINITE] += len(result.failed)

    def step_failed(self, cause: str, *, sequences: int) -> None:
        self.failed_steps[cause] += 1
        self.failed_sequences[cause] += sequences


class PrefillRate:
    """Prompt tokens per second, as a running mean over chunks.

    The duration of a chunk below ``MIN_CHUNK`` says more about the step than about its tokens: such
    chunks only give a ``lower_bound``.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self.lower_bound = 0.0
        self._delay = 0.0  # seconds of steps that held prompts back since the last paced tokens

    def measured(self, seconds: float, counts: StepCounts, *, limit: int | None) -> None:
        """Account for a step of ``limit`` paced tokens at most.

        The rate of paced tokens includes the steps before, in which the limit was 0.
        """
        if counts.paced:
            duration, self._delay = seconds + self._delay, 0.0
        else:
            duration = seconds
            if limit == 0:
                self._delay += seconds
        if duration <= 0:
            return
        rate, mean = counts.prompt / duration, self.tokens_per_second
        if counts.prompt < MIN_CHUNK:
            self.lower_bound = max(self.lower_bound, rate)
        else:
            self.tokens_per_second = (1 - _NEWEST) * mean + _NEWEST * rate if mean else rate
