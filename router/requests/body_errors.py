"""OpenAI's messages for the errors that pydantic finds in a body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

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
# The end of the location of a wrong key, after the key itself.
KEY = "[key]"
# By pydantic's types of errors.
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
    """The error for the first field of ``body`` that is wrong; ``at`` is the place of the body, if
    it is a part of another."""
    found = error.errors(include_url=False, include_input=False)[0]
    place, limits = found["loc"], found.get("ctx", {})
    if place[-1] == KEY:
        *outer, key, _ = place
        return _wrong_key(f"{at}.{_name(tuple(outer))}" if at else _name(tuple(outer)), key, found)
    name = f"{at}.{_name(place)}" if at else _name(place)
    kind = found["type"]
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
    return invalid(f"Invalid value for '{name}': {found['msg']}.", name, "invalid_value")


def _wrong_key(name: str, key: int | str, found: ErrorDetails) -> Exception:
    shown = str(key)[:64]
    return invalid(f"Invalid key '{shown}' in '{name}': {found['msg']}.", name, "invalid_key")


def wrong_type(name: str, expected: str, value: Any) -> Exception:
    """The error for a value of the wrong JSON type."""
    got = JSON_NAMES[type(value)]
    return invalid(
        f"Invalid type for '{name}': expected {expected}, but got {got} instead.",
        name,
        "invalid_type",
    )


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
    shown = str(bound) if isinstance(bound, int) else f"{bound:g}"
    side, code = ("below the minimum", "below_min") if below else ("above the maximum", "above_max")
    message = f"Invalid value for '{name}': {_short(value)} is {side} of {shown}."
    return invalid(message, name, f"{kind}_{code}_value")


def _name(place: tuple[int | str, ...]) -> str:
    """The parameter at a place: ``stop[3]`` for an item, the key alone for a nested object."""
    *outer, last = place
    return f"{_name(tuple(outer))}[{last}]" if isinstance(last, int) else last


def _value_at(body: Any, place: tuple[int | str, ...]) -> Any:
    """The value at a place, as the client sent it."""
    for step in place:
        body = body[step]
    return body


def _short(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return str(value)
