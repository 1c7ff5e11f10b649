"""Constraints in the language of llguidance: Lark rules that refer to schemas and other grammars.

A lazy rule ends at its first match, which is how free text ends at a marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...text.json_schema import clean_schema
from .grammar import GrammarError

# A rule of GBNF. Lark's rules have one colon.
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# The mark before a schema in a Lark grammar.
_JSON = re.compile(r"%json\s*")
_ANY = r"(.|\n)*"
_TEXT = f"/{_ANY}/"
# Limited, since some models never stop writing white space.
WHITESPACE = r"[ \t\r\n]{0,40}"
# Between the end of the reasoning and the output.
_SPACE = r"/[ \t\r\n]{0,8}/"


class TokenLiterals:
    """The special tokens of a tokenizer, which no text matches, by their text."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = dict(numbers)
        longest_first = sorted(self._numbers, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def literal(self, text: str) -> str:
        """A text as Lark, with its special tokens as tokens."""
        parts, end = [], 0
        for match in self._any.finditer(text):
            parts += [json.dumps(text[end : match.start()])] if match.start() > end else []
            parts.append(f"<[{self._numbers[match[0]]}]>")
            end = match.end()
        parts += [json.dumps(text[end:])] if text[end:] else []
        return " ".join(parts)

    def ends_with_token(self, text: str) -> bool:
        """True if the text is one special token."""
        return text in self._numbers


class GrammarText:
    """A main grammar and the grammars that it refers to."""

    def __init__(self, special: TokenLiterals) -> None:
        self._special = special
        self._rules: list[str] = []
        # By kind and body: with two rules for the same text, the lexer would follow only one.
        self._rule_names: dict[tuple[str, str], str] = {}
        self._grammars: list[dict[str, Any]] = []

    def whole(self, start: str) -> str:
        """The text to compile, with ``start`` as the expression of an output."""
        lark = "\n".join([f"start: {start}", *self._rules, ""])
        main = {"name": "main", "lark_grammar": lark}
        return json.dumps({"grammars": [main, *self._grammars]}, allow_nan=False)

    def literal(self, text: str) -> str:
        return self._special.literal(text)

    def schema(self, schema: Any, *, whitespace: bool = True) -> str:
        """A JSON value that satisfies a schema. Raises ``SchemaError``."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise GrammarError("a JSON schema must be an object")
        schema = clean_schema(schema)
        flexible = {"whitespace_pattern": WHITESPACE}
        options = flexible if whitespace else {"whitespace_flexible": False}
        own = schema.get("x-guidance")
        merged = {**options, **own} if isinstance(own, dict) else options
        return self._refer("json_schema", {**schema, "x-guidance": merged})

    def lark(self, grammar: str) -> str:
        """Text of a grammar in the syntax of Lark or GBNF."""
        if _GBNF.search(grammar):
            return self._refer("lark_grammar", _from_gbnf(grammar))
        return self._refer("lark_grammar", _with_followable_schemas(grammar))

    def regex(self, pattern: str) -> str:
        """Text that a regular expression matches as a whole."""
        return self._refer("lark_grammar", f"start: {_terminal(pattern)}")

    def choice(self, texts: list[str]) -> str:
        """One of several texts, as one terminal, because rules are limited in alternatives."""
        name = f"CHOICE_{len(self._rules)}"
        self._rules.append(f"{name}: " + " | ".join(map(json.dumps, texts)))
        return name

    def text(self) -> str:
        """Any text."""
        return self._rule("TEXT", _TEXT)

    def text_until(self, end: str, *, without: Sequence[str] = ()) -> str:
        """Any text up to and including the first ``end``, ``without`` these markers in it."""
        text = self._text_without([one for one in without if not self.is_token(one)])
        if self.is_token(end):
            return f"{text} {self.literal(end)}"
        return self._rule("until", f"{text} {self.literal(end)}", "[lazy]")

    def lazy(self, pattern: str) -> str:
        """The shortest text that a regular expression matches."""
        return self._rule("opening", _terminal(pattern), "[lazy]")

    def text_unless(self, opening: str) -> str:
        """Any text that does not begin with a match of a regular expression."""
        return self._rule("TEXT", f"{_TEXT} & ~{_terminal(f'({opening}){_ANY}')}")

    def is_token(self, text: str) -> bool:
        """True if the text is one special token, which free text never matches."""
        return self._special.ends_with_token(text)

    def marker(self, text: str) -> str:
        """A marker, in preference to free text that begins with it."""
        literal = self.literal(text)
        return literal if self.is_token(text) else self._rule("marker", literal, "[lazy]")

    def space(self) -> str:
        """A little white space."""
        return self._rule("SPACE", _SPACE)

    def rule(self, body: str) -> str:
        """A separate rule for an expression."""
        return self._rule("part", body)

    def _text_without(self, markers: list[str]) -> str:
        if not markers:
            return _TEXT
        pattern = "|".join(map(re.escape, markers))
        return self._rule("TEXT", f"{_TEXT} & ~{_terminal(f'{_ANY}({pattern}){_ANY}')}")

    def _rule(self, kind: str, body: str, attributes: str = "") -> str:
        name = self._rule_names.get((kind, body))
        if name is None:
            name = self._rule_names[kind, body] = f"{kind}_{len(self._rules)}"
            self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _refer(self, kind: str, content: Any) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, kind: content})
        return f"@{name}"


def _terminal(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/"


def _with_followable_schemas(grammar: str) -> str:
    """A Lark grammar, with its schemas in followable form."""
    parts, end = [], 0
    for match in _JSON.finditer(grammar):
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, match.end())
        except ValueError:
            continue  # not a schema but text, or invalid, which the compiler rejects
        parts += [grammar[end : match.end()], json.dumps(clean_schema(schema))]
        end = after
    return "".join((*parts, grammar[end:]))


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the parser has its own exception classes
        raise GrammarError(str(error)) from None
