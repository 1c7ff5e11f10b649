"""Errors of bodies: OpenAI's messages for pydantic's errors, with another API's field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ...shared.errors import RequestError
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
# The last item of the location of an invalid key, after the key itself.
KEY = "[key]"
# The expected type by pydantic's error type.
EXPECTED = {
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


def to_request_error(error: ValidationError, body: dict[str, Any], at: str = "") -> Exception:
    """The error for the first invalid field of ``body``. ``at`` is the body's own place if it is a
    part of another."""
    details = error.errors(include_url=False, include_input=False)[0]
    place, limits = details["loc"], details.get("ctx", {})
    if place[-1] == KEY:
        *outer, key, _ = place
        name = _name(tuple(outer))
        return _wrong_key(f"{at}.{name}" if at else name, key, details)
    name = f"{at}.{_name(place)}" if at else _name(place)
    kind = details["type"]
    if kind == "missing":
        message = f"Missing required parameter: '{name}'."
        return invalid(message, name, "missing_required_parameter")
    value = _value_at(body, place)
    if kind in EXPECTED:
        return wrong_type(name, EXPECTED[kind], value)
    if kind == "finite_number":
        return invalid(f"Invalid value for '{name}': must be a finite number.", name)
    if kind == "greater_than" and value == limits["gt"]:
        return invalid(f"Invalid value for '{name}': must be above {limits['gt']:g}.", name)
    if kind in ("greater_than", "greater_than_equal"):
        return _out_of_range(name, value, limits["ge" if "ge" in limits else "gt"], below=True)
    if kind == "less_than_equal":
        return _out_of_range(name, value, limits["le"], below=False)
    if kind in ("string_too_long", "too_long"):
        return too_long(name, value, limits["max_length"])
    return invalid(f"Invalid value for '{name}': {details['msg']}.", name, "invalid_value")


def _wrong_key(name: str, key: int | str, details: ErrorDetails) -> Exception:
    message = f"Invalid key '{str(key)[:64]}' in '{name}': {details['msg']}."
    return invalid(message, name, "invalid_key")


def wrong_type(name: str, expected: str, value: Any) -> Exception:
    """The error for a value of the wrong JSON type."""
    kind = JSON_NAMES[type(value)]
    message = f"Invalid type for '{name}': expected {expected}, but got {kind} instead."
    return invalid(message, name, "invalid_type")


def too_long(name: str, value: str | Sequence[Any] | dict[str, Any], limit: int) -> Exception:
    """The error for a string, array or object of more than ``limit`` characters or items."""
    if isinstance(value, str):
        message = f"'{name}' is too long: {len(value)} characters, the limit is {limit}."
        return invalid(message, name, "string_above_max_length")
    if isinstance(value, dict):
        message = f"'{name}' has too many entries: {len(value)}, the limit is {limit}."
        return invalid(message, name)
    message = f"'{name}' is too long: {len(value)} items, the limit is {limit}."
    return invalid(message, name, "array_above_max_length")


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise ``RequestError`` unless ``value`` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if value < low or value > high:
        raise _out_of_range(name, value, low if value < low else high, below=value < low)


def check_token(name: str, value: Any, vocab_size: int) -> None:
    """Raise ``RequestError`` unless ``value`` is the id of a token."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= vocab_size:
        message = (
            f"Invalid value for '{name}': {_short(value)} is out of vocabulary; the model's token "
            f"ids are 0 to {vocab_size - 1}."
        )
        raise invalid(message, name, "integer_above_max_value")
    check_integer(name, value, 0, vocab_size - 1)


def _out_of_range(name: str, value: float, bound: float, *, below: bool) -> Exception:
    kind = "integer" if isinstance(value, int) else "decimal"
    limit = str(bound) if isinstance(bound, int) else f"{bound:g}"
    side, code = ("below the minimum", "below_min") if below else ("above the maximum", "above_max")
    message = f"Invalid value for '{name}': {_short(value)} is {side} of {limit}."
    return invalid(message, name, f"{kind}_{code}_value")


def _name(place: tuple[int | str, ...]) -> str:
    """The parameter at a place: ``stop[3]``, ``metadata.key``."""
    *outer, last = place
    if isinstance(last, int):
        return f"{_name(tuple(outer))}[{last}]"
    return f"{_name(tuple(outer))}.{last}" if outer else last


def _value_at(body: Any, place: tuple[int | str, ...]) -> Any:
    """The value at a place, as the client sent it."""
    for step in place:
        body = body[step]
    return body


def _short(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return str(value)


# A pattern at the beginning of a field's name, and its replacement.
Names = Sequence[tuple[re.Pattern[str], str]]
_QUOTED = re.compile(r"'([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)'")


@contextmanager
def fields_renamed(names: Names) -> Iterator[None]:
    """Rename fields in errors that the block raises, for a request that is converted from another
    API's: in ``param``, and in quotes in the message."""
    try:
        yield
    except RequestError as error:
        error.args = (_QUOTED.sub(lambda quoted: f"'{_renamed(quoted[1], names)}'", str(error)),)
        error.param = None if error.param is None else _renamed(error.param, names)
        raise


def _renamed(field: str, names: Names) -> str:
    for pattern, replacement in names:
        renamed, count = pattern.subn(replacement, field, count=1)
        if count:
            return renamed
    return field
