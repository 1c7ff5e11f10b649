"""Counters of the engine's work, and the measured rate of prefill."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from .plan import NOT_FINITE, StepResult
from .scheduling.prefill_pacer import MIN_CHUNK

# Of the histogram of a step's tokens, as vLLM's.
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

    def step(self, result: StepResult, *, prompt_tokens: int) -> None:
        self.steps += 1
        self.step_seconds += result.seconds
        generated = sum(len(drawn.tokens) for drawn in result.sampled)
        self.generated_tokens += generated
        self.prompt_tokens += prompt_tokens
        self.step_tokens[bisect_left(STEP_TOKENS, prompt_tokens + generated)] += 1
        self.failed_sequences[NOT_FINITE] += len(result.failed)

    def step_failed(self, cause: str, *, sequences: int) -> None:
        self.failed_steps[cause] += 1
        self.failed_sequences[cause] += sequences


class PrefillRate:
    """Prompt tokens per second, as a running mean over chunks.

    The duration of a chunk below ``MIN_CHUNK`` says more about the step than about its tokens, so
    that the rate is ``at_least`` what such chunks show.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self.at_least = 0.0
        self._held_up = 0.0  # seconds of steps without prompts since the last chunk

    def measured(self, chunk: int, seconds: float, *, limit: int | None) -> None:
        """Account for a step that computed ``chunk`` prompt tokens, of ``limit`` at most.

        A limited chunk also takes the time of the steps that had to go without prompts.
        """
        if not chunk and limit == 0:
            self._held_up += seconds
        if seconds > 0 and chunk < MIN_CHUNK:
            self.at_least = max(self.at_least, chunk / seconds)
        elif seconds > 0:
            rate, known = chunk / (seconds + self._held_up), self.tokens_per_second
            self.tokens_per_second = (1 - _NEWEST) * known + _NEWEST * rate if known else rate
        if chunk:
            self._held_up = 0.0
