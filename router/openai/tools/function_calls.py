"""``functions`` and ``function_call``, the former names of tools in OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ...errors import invalid
from ...requests.body_errors import fields_renamed, wrong_type

_NAMES = (
    (re.compile(r"^tools(\[\d+\])\.function"), r"functions\1"),
    (re.compile(r"^tools\b"), "functions"),
    (re.compile(r"^tool_choice\b"), "function_call"),
)


class _ChatWithFunctions(Protocol):
    @property
    def functions(self) -> list[Any]: ...

    @property
    def function_call(self) -> Any: ...

    @property
    def tools(self) -> list[Any]: ...


def asks_for_functions(chat: _ChatWithFunctions) -> bool:
    """True if a request uses the former names, which its response then uses too. Raises
    ``RequestError`` if it uses both."""
    if chat.functions and chat.tools:
        message = "'functions' is the former name of 'tools'; set one of them."
        raise invalid(message, "functions", "invalid_value")
    if chat.function_call not in (None, "none", "auto") and not chat.functions:
        message = "When using 'function_call', 'functions' must be set."
        raise invalid(message, "function_call", "missing_required_parameter")
    return bool(chat.functions)


def as_tools(functions: list[Any]) -> list[Any]:
    return [{"type": "function", "function": function} for function in functions]


def as_tool_choice(choice: Any) -> Any:
    """The ``tool_choice`` of a ``function_call``. Raises ``RequestError``."""
    if choice in (None, "none", "auto"):
        return choice
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise wrong_type("function_call", "'none', 'auto' or an object with a name", choice)
    return {"type": "function", "function": {"name": choice["name"]}}


@contextmanager
def functions_in_errors(*, former: bool) -> Iterator[None]:
    """Use the ``former`` field names in errors raised in the block."""
    with fields_renamed(_NAMES if former else ()):
        yield
