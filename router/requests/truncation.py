"""``truncate_prompt_tokens``: prompts cut to a length on either side, as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import invalid
from ..served_model import ServedModel


class _Body(Protocol):
    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep at most ``tokens`` of each prompt: the last ones if the ``left`` side is cut off."""

    tokens: int
    left: bool

    def cut(self, tokens: list[Any]) -> list[Any]:
        """The tokens without the part to cut off."""
        return tokens[-self.tokens :] if self.left else tokens[: self.tokens]


def max_prompt_tokens(model: ServedModel, generated: int) -> int:
    """The longest prompt with room for ``generated`` tokens."""
    return max(1, model.max_model_len - generated)


def read_truncation(body: _Body, max_tokens: int) -> Truncation | None:
    """The truncation that a body requests; -1 means ``max_tokens``. Raises ``RequestError``."""
    tokens = body.truncate_prompt_tokens
    if tokens is None:
        return None
    if tokens == 0 or tokens > max_tokens:
        raise invalid(
            f"Invalid value for 'truncate_prompt_tokens': {tokens}; it must be -1 (as many as fit) "
            f"or from 1 to {max_tokens}, so that there is room for the completion.",
            "truncate_prompt_tokens",
        )
    return Truncation(max_tokens if tokens < 0 else tokens, body.truncation_side == "left")
