"""Leave out the oldest messages of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .context import ContextError

Messages = list[dict[str, Any]]
T = TypeVar("T")


def parse_fitting(
    messages: Messages, parse: Callable[[Messages], T], *, whole_turns: bool = True
) -> T:
    """Parse as many of the last messages as fit, and all system messages. With ``whole_turns``, the
    first other message is the user's, so that no tool result loses its call. Raises
    ``ContextError`` if the last turn, or message, alone does not fit."""
    try:
        return parse(messages)
    except ContextError:
        starts: Sequence[int] = range(len(messages))
        if whole_turns:
            starts = [i for i in starts if messages[i]["role"] == "user"]
        if not starts[1:]:
            raise
    # Bisect for the first start that fits.
    result = parse(_from(messages, starts[-1]))
    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            result = parse(_from(messages, starts[middle]))
            high = middle
        except ContextError:
            low = middle + 1
    return result


def _from(messages: Messages, start: int) -> Messages:
    instructions = [m for m in messages[:start] if m["role"] in ("system", "developer")]
    return [*instructions, *messages[start:]]
