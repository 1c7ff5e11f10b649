"""Python literals as JSON; JSON's constants are accepted too."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
MAX_DEPTH = 32
# Characters of a literal outside of its strings; parsing more would delay all other choices by tens
# of milliseconds.
MAX_STRUCTURE = 4096
_QUOTES = ("'''", '"""', "'", '"')
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTE = re.compile("|".join(_QUOTES))
# The text after an opening quote. Python 3.11.2 never matches a group that ``*+`` repeats.
_STRING = {
    quote: re.compile(rf"(?>(?:(?!{quote})[^\\]|\\.)*){quote}", re.DOTALL) for quote in _QUOTES
}


def literal_to_json(text: str) -> str:
    """Convert a literal to JSON. Raises ``ValueError`` if it is invalid, too large or too deep."""
    if not _is_quick(text):
        raise ValueError("not a literal, or too large")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes such as \\d, which stay unchanged
            tree = ast.parse(text.strip(), mode="eval")
        return _json(_value(tree.body, MAX_DEPTH))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a literal: {error}") from None


def _json(value: Any) -> str:
    """A value as JSON. A lone surrogate, which only an escape can write, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _is_quick(text: str) -> bool:
    """True if a literal is quick to parse: at most ``MAX_STRUCTURE`` characters are quotes or
    outside of strings, and there is no f-string, whose expressions are slowest of all."""
    remaining, at = MAX_STRUCTURE, 0
    while quote := _QUOTE.search(text, at):
        before = text[at : quote.start()]
        remaining -= len(before) + 2
        string = _STRING[quote[0]].match(text, quote.end())
        if string is None or remaining < 0 or "f" in before[-2:].lower():
            return False
        at = string.end()
    return len(text) - at <= remaining


def _value(node: ast.expr, depth: int) -> Any:
    if depth == 0:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item, depth - 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key, depth): _value(value, depth - 1) for key, value in pairs}
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError(f"{type(node).__name__} is not a literal")


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:  # ** in a dict
        raise ValueError("an unpacked dict is no literal")
    value = _value(node, depth - 1)
    return value if isinstance(value, str) else json.dumps(value)
