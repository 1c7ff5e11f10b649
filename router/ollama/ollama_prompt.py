"""Prompts that are cut to ``num_ctx`` tokens, as Ollama does unless ``truncate`` is false."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from ...shared.errors import RequestError
from ..errors import invalid
from ..requests.context import ContextError
from ..served_model import ServedModel
from .ollama_options import OllamaOptions

Turns = list[dict[str, Any]]
# Of the beginning of a prompt that is cut, by default.
KEPT = 4


def context_of(options: OllamaOptions, model: ServedModel) -> int:
    """The tokens of prompt and answer together: at most as many as the model takes."""
    return min(options.num_ctx or model.max_model_len, model.max_model_len)


def fitting_chat(
    turns: Turns, encode: Callable[[Turns], list[int]], limit: int, *, truncate: bool
) -> list[int]:
    """The tokens of the newest turns that leave room in ``limit``; system messages and the last
    turn always stay. Raises ``RequestError`` if those alone do not fit."""
    droppable = [
        i for i, turn in enumerate(turns[:-1]) if turn["role"] not in ("system", "developer")
    ]

    def fitting(count: int) -> list[int] | None:
        dropped = set(droppable[:count])
        try:
            tokens = encode([turn for i, turn in enumerate(turns) if i not in dropped])
        except ContextError:  # even longer than a prompt that is cut may be
            return None
        return tokens if len(tokens) < limit else None

    counts = range(len(droppable) + 1 if truncate else 1)
    fewest = bisect_left(counts, True, key=lambda count: fitting(count) is not None)
    found = fitting(fewest) if fewest < len(counts) else None
    if found is None:
        raise _too_long(limit)
    return found


def fitting_text(
    tokens: list[int], options: OllamaOptions, limit: int, *, truncate: bool
) -> list[int]:
    """The beginning and the end of a prompt, without its middle if it is too long."""
    if len(tokens) < limit:
        return tokens
    if not truncate:
        raise _too_long(limit)
    kept = KEPT if options.num_keep is None else options.num_keep
    kept = min(limit if kept < 0 else kept, limit // 2)
    return tokens[:kept] + tokens[len(tokens) - (limit - 1 - kept) :]


def check_input(tokens: list[int], limit: int) -> None:
    """Raise ``RequestError`` for a text to embed that is too long."""
    if len(tokens) > limit:
        raise _too_long(limit)


def _too_long(limit: int) -> RequestError:
    message = (
        f"the input length exceeds the context length of {limit} tokens; shorten it, or raise "
        f"'num_ctx' if the model takes more"
    )
    return invalid(message, "num_ctx", "context_length_exceeded")
