"""The constraint on a request's outputs, as callers specify it."""

from __future__ import annotations

import json as _json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError

# The limit of a constraint's text. Compile time grows with the square of its length, and nesting
# with its length: at this size, the slowest grammar takes a second.
MAX_CHARACTERS = 128 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on every output of a request: exactly one of the following.

    ``json`` is a JSON schema, as a mapping or as text. ``choice`` lists the allowed outputs.
    ``grammar`` is a context-free grammar in the syntax of Lark or GBNF. ``json_object`` is any JSON
    object. ``structural_tag`` describes text with constrained parts, as a mapping or as JSON;
    ``tool_calls`` is a router's specification of text with tool calls (``calls_in_text.py``).

    ``whitespace`` allows optional whitespace in JSON. The constraint holds after the model's
    reasoning, which ends with ``reasoning_end``, unless that is empty; outputs that do not begin
    with ``reasoning_start`` have none. ``param`` is the name of the constraint in error messages.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | Mapping[str, Any] | None = None
    tool_calls: str | Mapping[str, Any] | None = None
    whitespace: bool = True
    reasoning_start: str = ""
    reasoning_end: str = ""
    param: str = "structured_outputs"

    def key(self) -> GrammarKey:
        """The constraint as a key to compile. Raises ``RequestError``."""
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            names = " and ".join(kinds) or "none"
            raise self.error(f"exactly one of {', '.join(KINDS)} is needed, and {names} is given")
        kind = kinds[0]
        text = self._text(kind)
        limit = MAX_REGEX_CHARACTERS if kind == "regex" else MAX_CHARACTERS
        if len(text) > limit:
            raise self.error(
                f"the {kind} has {len(text)} characters; at most {limit} are supported"
            )
        return GrammarKey(kind, text, self.whitespace, self.reasoning_start, self.reasoning_end)

    def error(self, reason: str) -> RequestError:
        """The error for a constraint that cannot be followed."""
        return RequestError(f"Invalid '{self.param}': {reason}.", param=self.param)

    def _text(self, kind: str) -> str:
        value = getattr(self, kind)
        if kind == "choice":
            return self._choices(value)
        if isinstance(value, Mapping):
            try:
                return _json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise self.error(f"the {kind} is not JSON: {error}") from None
        if kind == "json_object":
            return ""
        if not isinstance(value, str) or not value:
            raise self.error(f"the {kind} is {value!r:.64}; it must be a non-empty string")
        return value

    def _choices(self, value: Any) -> str:
        texts = isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
        if not texts or not value:
            raise self.error("the choice must be a list of at least one string")
        return _json.dumps(value)


@dataclass(frozen=True, slots=True)
class GrammarKey:
    """The key of a compiled grammar: the constraint's kind, text and options."""

    kind: str
    text: str
    whitespace: bool = True
    reasoning_start: str = ""
    reasoning_end: str = ""
