"""The limit of prompt tokens in a step while streams wait for it.

Streams get a token a step, so a step with a long chunk stops them for as long as the chunk takes.
The pacer measures how long decoding takes and what each prompt token adds, and cuts chunks so that
steps meet a target. Chunks below ``MIN_CHUNK`` would cost more than they save, because each one
reads its whole context, and so would chunks of less than ``MIN_CHUNK_SECONDS``, because a step with
a chunk has costs of its own, such as the launches of its kernels on a GPU. If a chunk exceeds the
target, steps without prompts follow until the streams are compensated. There is no clock here.
"""

from __future__ import annotations

from .step_budget import StepCounts

# Without --itl-target, a step may on average take this many times as long as decoding alone.
# Streams keep a third of their speed, and prompts get two thirds of the time.
STRETCH = 3.0
# The lowest target, as a multiple of the duration of decoding: prompts must proceed.
MIN_STRETCH = 1.5
# Tokens of the shortest chunk.
MIN_CHUNK = 64
# Time that a chunk may always take: a longer gap between tokens would be noticed.
MIN_CHUNK_SECONDS = 0.025
# Steps without prompts between two chunks, at most; reached after the machine was suspended.
MAX_SKIPPED = 64
# After this many steps with chunks comes one without, which measures the duration of decoding.
PROBE_EVERY = 64
# Weight of the newest step in the running means.
_NEWEST = 0.3
# A step that takes this many times as long as expected is an outlier: the machine interrupted it.
_OUTLIER = 8.0


class PrefillPacer:
    """``itl_target`` is the average duration of a step with streams, in seconds; ``None`` means
    ``STRETCH`` times that of decoding alone, 0 means no limit."""

    def __init__(self, itl_target: float | None = None) -> None:
        self._itl_target = itl_target
        self._decode = 0.0  # seconds of a step without prompts
        self._token = 0.0  # seconds that each prompt token adds
        self._debt = 0.0  # seconds by which steps have exceeded their target
        self._skipped = 0  # steps without prompts since the last chunk
        self._chunks = 0  # steps with prompts since the last one without

    @property
    def limit(self) -> int | None:
        """The limit of prompt tokens in the next step, if it decodes; ``None``: no limit."""
        if self._itl_target == 0:
            return None
        compensates = self._debt > 0 and self._skipped < MAX_SKIPPED
        if compensates or self._chunks >= PROBE_EVERY or not self._decode:
            return 0
        if not self._token:
            return MIN_CHUNK
        seconds = max(self._target - self._decode, MIN_CHUNK_SECONDS)
        return max(MIN_CHUNK, int(seconds / self._token))

    def measured(self, seconds: float, counts: StepCounts) -> None:
        """Account for a step."""
        if not counts.decoded:
            return
        if counts.paced:
            self._chunks += 1
            self._skipped = 0
            if self._decode:
                added = max(0.0, seconds - self._decode) / counts.paced
                self._token = _mean(self._token, added)
        else:
            self._chunks = 0
            self._skipped += 1
            self._decode = _mean(self._decode, seconds)
        if self._skipped >= MAX_SKIPPED:
            self._debt = 0.0
        elif self._decode:
            self._debt = max(0.0, self._debt + seconds - self._target)

    @property
    def _target(self) -> float:
        if self._itl_target is None:
            return STRETCH * self._decode
        return max(self._itl_target, MIN_STRETCH * self._decode)


def _mean(mean: float, value: float) -> float:
    if not mean:
        return value
    return mean + _NEWEST * (min(value, _OUTLIER * mean) - mean)
