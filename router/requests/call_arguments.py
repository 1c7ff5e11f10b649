"""The arguments of tool calls that models have written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...shared.telemetry.logs import RateLimitedFilter, logger
from ..http.json_body import parse_text

log = logger("router.arguments")
log.addFilter(RateLimitedFilter())

# Levels of objects and arrays; variables of a chat template cannot have many more.
MAX_NESTING = 48


class HistoryArguments:
    """Reads the arguments of the tool calls in one conversation. Arguments that are not a JSON
    object, which models do write and clients send back, are replaced by an empty object."""

    def __init__(self) -> None:
        self._unusable = 0

    def read(self, arguments: Any) -> dict[str, Any]:
        """The arguments as an object. ``arguments`` is an object, its JSON, or an empty string."""
        value = _parse(arguments) if isinstance(arguments, str) else arguments
        if isinstance(value, dict) and not _is_deep(value):
            return value
        if arguments not in (None, ""):
            self._unusable += 1
        return {}

    def note(self) -> None:
        """Log the number of replaced arguments, if any."""
        if self._unusable:
            log.warning(
                "%d calls in a conversation have arguments that are not a JSON object; the model "
                "sees them with empty arguments",
                self._unusable,
            )


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; empty if they are not one, such as after a cut."""
    value = _parse(text)
    return value if isinstance(value, dict) else {}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [item for parent in level for item in _items(parent)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    """The objects and arrays directly inside an object or an array."""
    items = value.values() if isinstance(value, dict) else value
    return (item for item in items if isinstance(item, (dict, list)))


def _parse(text: str) -> Any:
    try:
        return parse_text(text)
    except ValueError:
        return None
