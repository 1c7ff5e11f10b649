"""A planned request of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from ..client.api_server import Prompt

# More than any model's context, so a larger length must be a mistake.
MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A prompt and its lengths; 0 means unknown. ``at`` is its time in a trace, in seconds."""

    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    at: float | None = None
