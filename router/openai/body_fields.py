"""Typed access to a request body, with OpenAI's errors for wrong types and ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import invalid

JSON_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def wrong_type(name: str, expected: str, value: Any) -> Exception:
    """The error for a value of the wrong JSON type."""
    got = JSON_NAMES[type(value)]
    return invalid(
        f"Invalid type for '{name}': expected {expected}, but got {got} instead.",
        name,
        "invalid_type",
    )


# Unknown fields of one request that are recorded; clients repeat the same ones.
MAX_IGNORED = 16


class Fields:
    """A request body. ``null`` stands for the default, as in OpenAI's API.

    ``ignored`` collects unknown names, with the prefix ``within``.
    """

    def __init__(self, body: Any, within: str = "", ignored: set[str] | None = None) -> None:
        if not isinstance(body, dict):
            raise invalid("The request body must be a JSON object.")
        self._body = {name: value for name, value in body.items() if value is not None}
        self._within = within
        self.ignored: set[str] = set() if ignored is None else ignored

    def inner(self, body: dict[str, Any], within: str) -> Fields:
        """The fields of a nested object, which shares ``ignored``."""
        return Fields(body, f"{within}.", self.ignored)

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def raw(self, name: str) -> Any:
        """The value as received; ``None`` if absent."""
        return self._body.get(name)

    def check_names(
        self, known: frozenset[str], unsupported: Mapping[str, tuple[Any, ...]]
    ) -> None:
        """Reject names whose features are not implemented, except with the values in
        ``unsupported``, which have no effect. Unknown names are ignored, as in vLLM."""
        for name, value in self._body.items():
            if name in unsupported:
                if value not in unsupported[name]:
                    message = f"'{name}' is not supported by this server; leave it out."
                    raise invalid(message, name, "unsupported_parameter")
            elif name not in known and len(self.ignored) < MAX_IGNORED:
                self.ignored.add(self._within + name[:64])

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name, default)
        if not isinstance(value, bool):
            raise wrong_type(name, "a boolean", value)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value = self._body.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(name, "a number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(f"Invalid value for '{name}': must be a finite number.", name)
        _check_range(name, value, low, high)
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """An integer in [low, high]."""
        value = self._body.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients write 100.0, which vLLM accepts too
        check_integer(name, value, low, high)
        return int(value)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """As ``integer``; ``None`` if absent."""
        return self.integer(name, 0, low, high) if name in self._body else None

    def string(self, name: str, default: str, max_length: int) -> str:
        value = self._body.get(name, default)
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if len(value) > max_length:
            message = f"'{name}' is too long: {len(value)} characters, the limit is {max_length}."
            raise invalid(message, name, "string_above_max_length")
        return value

    def mapping(self, name: str, max_items: int) -> dict[str, Any]:
        value = self._body.get(name, {})
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        if len(value) > max_items:
            message = f"'{name}' has too many entries: {len(value)}, the limit is {max_items}."
            raise invalid(message, name)
        return value

    def array(self, name: str, max_items: int) -> list[Any]:
        value = self._body.get(name, [])
        if not isinstance(value, list):
            raise wrong_type(name, "an array", value)
        if len(value) > max_items:
            message = f"'{name}' is too long: {len(value)} items, the limit is {max_items}."
            raise invalid(message, name, "array_above_max_length")
        return value


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise ``RequestError`` unless ``value`` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    _check_range(name, value, low, high)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    kind = "integer" if isinstance(value, int) else "decimal"
    if value < low:
        message = f"Invalid value for '{name}': {_short(value)} is below the minimum of {low}."
        raise invalid(message, name, f"{kind}_below_min_value")
    if value > high:
        message = f"Invalid value for '{name}': {_short(value)} is above the maximum of {high}."
        raise invalid(message, name, f"{kind}_above_max_value")


def _short(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return str(value)
