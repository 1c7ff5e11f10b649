"""A request of a benchmark before it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from ..client.api_server import Prompt

# More than any model's context: a larger number is a mistake in a file or on the command line.
MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """``at`` is when a trace has it, in seconds from the begin. A length of 0 is unknown."""

    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    at: float | None = None
