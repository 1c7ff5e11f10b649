"""Conversations that do not fit the context: their oldest messages are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .context import ContextError

Messages = list[dict[str, Any]]
T = TypeVar("T")


def parse_fitting(
    messages: Messages, parse: Callable[[Messages], T], *, whole_turns: bool = True
) -> T:
    """Parse as many of the last messages as fit, with the instructions before them. If only
    ``whole_turns`` are left out, they begin with a message of the user, so that no result of a call
    loses its call. Raises ``ContextError`` if the last turn, or message, alone does not fit."""
    try:
        return parse(messages)
    except ContextError:
        starts: Sequence[int] = range(len(messages))
        if whole_turns:
            starts = [i for i in starts if messages[i]["role"] == "user"]
        if not starts[1:]:
            raise
    found = parse(_from(messages, starts[-1]))
    fewest, most = 1, len(starts) - 1  # starts that may be passed over
    while fewest < most:
        middle = (fewest + most) // 2
        try:
            found = parse(_from(messages, starts[middle]))
            most = middle
        except ContextError:
            fewest = middle + 1
    return found


def _from(messages: Messages, start: int) -> Messages:
    told = [m for m in messages[:start] if m["role"] in ("system", "developer")]
    return [*told, *messages[start:]]
