"""The arguments of calls that models have written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...shared.telemetry.logs import RateLimitedFilter, logger
from ..http.json_body import parse_text

log = logger("router.arguments")
log.addFilter(RateLimitedFilter())

# Levels of objects and arrays: the variables of a template may not have many more.
MAX_NESTING = 48


class HistoryArguments:
    """Reads the arguments of the calls in one conversation. Models write ones that are not a JSON
    object, and clients send them again with each turn: the model then sees a call without any."""

    def __init__(self) -> None:
        self._unusable = 0

    def read(self, given: Any) -> dict[str, Any]:
        """The arguments as an object; ``given`` is one, or its text, which may be empty."""
        value = _parsed(given) if isinstance(given, str) else given
        if isinstance(value, dict) and not _is_deep(value):
            return value
        if given not in (None, ""):
            self._unusable += 1
        return {}

    def note(self) -> None:
        """Log how many were unusable, if any were."""
        if self._unusable:
            log.warning(
                "%d calls in a conversation have arguments that are not a JSON object; the model "
                "sees them without any",
                self._unusable,
            )


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; an empty one if they are none, as those of a call that was cut
    off."""
    value = _parsed(text)
    return value if isinstance(value, dict) else {}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [item for parent in level for item in _items(parent)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    """What is nested directly in an object or an array."""
    items = value.values() if isinstance(value, dict) else value
    return (item for item in items if isinstance(item, (dict, list)))


def _parsed(text: str) -> Any:
    try:
        return parse_text(text)
    except ValueError:
        return None
