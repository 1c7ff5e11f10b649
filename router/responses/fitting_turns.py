"""``truncation: auto``: the oldest turns of a conversation that does not fit are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..requests.context import ContextError

Messages = list[dict[str, Any]]
T = TypeVar("T")


def parse_fitting(messages: Messages, parse: Callable[[Messages], T]) -> T:
    """Parse as many of the last turns as fit, with the instructions between them. A turn begins
    with a message of the user, so that no result of a call loses its call. Raises ``ContextError``
    if the last turn alone does not fit."""
    try:
        return parse(messages)
    except ContextError:
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not starts[1:]:
            raise
    found = parse(_from(messages, starts[-1]))
    fewest, most = 1, len(starts) - 1  # turns that may be left out
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
