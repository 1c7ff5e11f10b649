"""Python's literals as JSON, with the names that models borrow from JSON."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
MAX_DEPTH = 32


def literal_to_json(text: str) -> str:
    """The JSON of a literal. Raises ``ValueError`` if it is none, or nested too deeply."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes such as \\d, which stay as they are
            tree = ast.parse(text.strip(), mode="eval")
        return json.dumps(_value(tree.body, MAX_DEPTH), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a literal: {error}") from None


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
    raise ValueError(f"{type(node).__name__} is no literal")


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:  # ** in a dict
        raise ValueError("an unpacked dict is no literal")
    value = _value(node, depth - 1)
    return value if isinstance(value, str) else json.dumps(value)
