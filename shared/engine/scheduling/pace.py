"""How many prompt tokens a step may compute while streams wait for it.

Streams get a token a step, so a step with a long chunk stops them for as long as the chunk takes.
From the measured seconds of steps ``Pace`` knows what decoding takes and what each prompt token
adds, and cuts chunks so that steps meet a target. Chunks that were shorter still would cost more
than they give, because each one reads its whole context; so where even the least chunk takes longer
than the target, steps without prompts follow until streams have what they are owed. It has no clock
of its own.
"""

from __future__ import annotations

# Without --itl-target, a step may take on average so many times what decoding alone does. Streams
# keep a third of their speed, and prompts get two thirds of the time.
STRETCH = 3.0
# A target below so many times what decoding takes is one of that: prompts must go on.
LEAST_STRETCH = 1.5
# Tokens of a chunk at the least.
LEAST = 64
# Steps without prompts between two chunks at the most, after a pause of the machine.
MOST_SKIPPED = 64
# After so many steps with chunks one goes without, so that the time of decoding stays known.
PROBE_EVERY = 64
# Weight of the newest step in the running means.
_NEW = 0.3
# A step that is so many times as long as was expected is a pause of the machine.
_OUTLIER = 8.0


class Pace:
    """``itl_target`` is in seconds: what a step with streams may take on average. ``None``: as
    decoding alone does, times ``STRETCH``. 0: as long as it likes."""

    def __init__(self, itl_target: float | None = None) -> None:
        self._given = itl_target
        self._decode = 0.0  # seconds of a step without prompts
        self._token = 0.0  # seconds that each prompt token adds to it
        self._owed = 0.0  # seconds by which steps have been longer than their target
        self._skipped = 0  # steps without prompts since the last chunk
        self._chunks = 0  # steps with prompts since the last one without

    @property
    def prompt_tokens(self) -> int | None:
        """The most that the next step may compute of prompts if it decodes; ``None``: any."""
        if self._given == 0:
            return None
        owes = self._owed > 0 and self._skipped < MOST_SKIPPED
        if owes or self._chunks >= PROBE_EVERY:
            return 0
        if not self._decode or not self._token:
            return LEAST
        return max(LEAST, int((self._target - self._decode) / self._token))

    def measured(self, seconds: float, *, decoded: int, prompt_tokens: int) -> None:
        """A step took so long, for so many decoding rows and tokens of prompts."""
        if not decoded:
            return
        if prompt_tokens:
            self._chunks += 1
            self._skipped = 0
            if self._decode:
                added = max(0.0, seconds - self._decode) / prompt_tokens
                self._token = _mean(self._token, added)
        else:
            self._chunks = 0
            self._skipped += 1
            self._decode = _mean(self._decode, seconds)
        if self._skipped >= MOST_SKIPPED:
            self._owed = 0.0
        elif self._decode:
            self._owed = max(0.0, self._owed + seconds - self._target)

    @property
    def _target(self) -> float:
        if self._given is None:
            return STRETCH * self._decode
        return max(self._given, LEAST_STRETCH * self._decode)


def _mean(known: float, new: float) -> float:
    if not known:
        return new
    return known + _NEW * (min(new, _OUTLIER * known) - known)
