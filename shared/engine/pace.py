"""How many prompt tokens a step may compute while streams wait for it.

Streams get a token a step, so a step with a long chunk stops them for as long as the chunk takes.
From the measured seconds of steps ``Pace`` knows what a step of decoding takes and what each prompt
token adds, and cuts chunks so that a step meets a target. It has no clock of its own.
"""

from __future__ import annotations

# Without --itl-target, a step with a chunk may take so many times a step without one. Streams keep
# a third of their speed, and prompts two thirds of the time.
STRETCH = 2.75
# Tokens of a chunk at the least: fewer would read the weights for next to nothing.
LEAST = 16
# A chunk before anything is known of what one costs.
FIRST = 32
# After so many steps with chunks one goes without, so that the time of decoding stays known.
PROBE_EVERY = 64
# Weight of the newest step in the running means.
_NEW = 0.3
# A step that is so many times as long as was expected is a pause of the machine.
_OUTLIER = 8.0


class Pace:
    """``itl_target`` is in seconds: what a step with streams may take. ``None``: as decoding alone
    does, times ``STRETCH``. 0: as long as it likes."""

    def __init__(self, itl_target: float | None = None) -> None:
        self._target = itl_target
        self._decode = 0.0  # seconds of a step without prompts
        self._token = 0.0  # seconds that each prompt token adds to it
        self._since_probe = 0

    @property
    def prompt_tokens(self) -> int | None:
        """The most that the next step may compute of prompts if it decodes; ``None``: any."""
        if self._target == 0:
            return None
        if self._since_probe >= PROBE_EVERY:
            return 0
        if not self._decode or not self._token:
            return FIRST
        target = STRETCH * self._decode if self._target is None else self._target
        return max(LEAST, int((target - self._decode) / self._token))

    def measured(self, seconds: float, *, decoded: int, prompt_tokens: int) -> None:
        """A step took so long, for so many decoding rows and tokens of prompts."""
        if not decoded:
            return
        if not prompt_tokens:
            self._since_probe = 0
            self._decode = _mean(self._decode, seconds)
            return
        self._since_probe += 1
        if self._decode:
            self._token = _mean(self._token, max(0.0, seconds - self._decode) / prompt_tokens)


def _mean(known: float, new: float) -> float:
    if not known:
        return new
    return known + _NEW * (min(new, _OUTLIER * known) - known)
