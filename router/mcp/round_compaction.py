"""A summary between two rounds, once their conversation has grown too long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..generation import GenerationRequest, Outputs, Parsing

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What the model wrote instead of the conversation."""

    text: str
    tokens: list[int]


class RoundCompaction(Protocol):
    """Compacts the conversation of a request whose prompt has more tokens than ``threshold``."""

    @property
    def threshold(self) -> int: ...

    async def summary(
        self,
        messages: Messages,
        name: str,
        generate: Callable[[GenerationRequest], Outputs],
        parse: Parsing,
    ) -> RoundSummary | None:
        """Let the model write a summary, as the request ``name``; ``None`` if there is no room for
        it, or if it is empty."""

    def compacted(self, summary: str) -> Messages:
        """The messages in which the summary stands for what the model wrote."""
