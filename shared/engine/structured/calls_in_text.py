"""Grammars of text with tool calls.

``lists`` are the ways to write calls: after a ``trigger`` anywhere in the text, or after an
``opening``, a regular expression. ``anywhere`` is true if an opening may follow other text;
otherwise it begins the output, perhaps behind one of ``tags``. A list is ``{"begin": ..., "calls":
[...], "separator": ..., "end": ..., "texts": [...]}``: calls between ``begin`` and ``end``, only
one if there is no separator. A text ends the output, so its list has no end.

The ``begin`` of a call is a list of texts and ``{"regex": ...}``. Its content is a ``schema``, by
its name in ``schemas``; ``fields``; a grammar (``lark``), a ``regex``, or any text up to ``until``
that is ``without`` other markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .channels import calls_in_channels
from .grammar_text import GrammarText

# The ways to write a list of calls.
Write = Callable[[Any], list[str]]
# White space that the parsers of calls skip.
_SPACES = r"[\s\x1c-\x1f]*"


class CallsInText:
    """Outputs with or without calls, by a router's specification."""

    def __init__(self, grammar: GrammarText, spec: Any) -> None:
        self._grammar = grammar
        self._spec = spec
        self._write = _CallWriter(grammar, spec)

    def output(self) -> str:
        """The expression of an output."""
        spec = self._spec
        if "channels" in spec:
            return calls_in_channels(self._grammar, spec["channels"], self._write.call)
        return f"{self._again()} {self._rest()}" if spec["anywhere"] else self._at_start()

    def early(self, end: str) -> str:
        """An output whose first call begins within the reasoning, whose ``end`` may follow the call
        instead. It needs a marker of calls that is a special token, which free text cannot contain;
        empty without one."""
        if "channels" in self._spec:
            return ""
        token, text = self._grammar.is_token, self._grammar.text()
        if self._spec["anywhere"]:
            lists = [each for each in self._spec["lists"] if token(each.get("trigger", ""))]
            closed, last = self._in_text(lists, self._write.closed), self._last(lists)
            again, rest = self._again(), self._rest()
        else:
            tags = [tag for tag in self._spec["tags"] if token(tag)]
            closed = [f"{text} {way}" for way in self._tagged(tags, self._write.closed)]
            last = [f"{text} {way}" for way in self._tagged(tags, self._write.last)]
            again, rest = "", text
        stray = f"({self._grammar.text_until(end)} {again})?" if token(end) else ""
        ways = [*last, *(f"{way} {again} {stray} {rest}" for way in closed)]
        return _one_of(ways) if ways else ""

    def _again(self) -> str:
        """Any number of closed lists, each after some text."""
        closed = self._in_text(self._spec["lists"], self._write.closed)
        return f"{_one_of(closed)}*" if closed else ""

    def _rest(self) -> str:
        """The text at the end, perhaps with a list that the output's end closes."""
        return _one_of([self._grammar.text(), *self._last(self._spec["lists"])])

    def _last(self, lists: list[Any]) -> list[str]:
        return self._in_text(lists, self._write.last)

    def _in_text(self, lists: list[Any], write: Write) -> list[str]:
        """Each way to write text and then calls."""
        space = self._grammar.space()
        return [f"{self._until(one)} {space} {calls}" for one in lists for calls in write(one)]

    def _until(self, each: Any) -> str:
        if "trigger" in each:
            return self._grammar.text_until(each["trigger"])
        return self._grammar.lazy(f"(.|\\n)*{each['opening']}")

    def _at_start(self) -> str:
        """Calls, or a text that does not begin like one."""
        grammar, lists, tags = self._grammar, self._spec["lists"], self._spec["tags"]
        tokens = [tag for tag in tags if grammar.is_token(tag)]
        plain_tags = "|".join(re.escape(tag) for tag in tags if tag not in tokens)
        before = f"{_SPACES}(({plain_tags}){_SPACES})?" if plain_tags else _SPACES
        ways = []
        for write in (self._write.closed, self._write.last):
            ways += [*self._opened(before, write), *self._tagged(tokens, write)]
        openings = "|".join(each["opening"] for each in lists)
        return f"{_one_of([*ways, grammar.text_unless(f'{before}({openings})')])}?"

    def _opened(self, before: str, write: Write) -> list[str]:
        """Each way to write calls behind ``before``."""
        lazy, space = self._grammar.lazy, self._grammar.space()
        return [
            f"{lazy(before + each['opening'])} {space} {calls}"
            for each in self._spec["lists"]
            for calls in write(each)
        ]

    def _tagged(self, tags: list[str], write: Write) -> list[str]:
        """Each way to write calls behind one of these tokens."""
        space, literal = self._grammar.space(), self._grammar.literal
        opened = self._opened(_SPACES, write)
        return [f"{space} {literal(tag)} {_one_of(opened)}" for tag in tags if opened]


class _CallWriter:
    """Writes calls; each schema becomes one rule."""

    def __init__(self, grammar: GrammarText, spec: Any) -> None:
        self._grammar = grammar
        self._schemas = spec["schemas"]
        self._schema_rules: dict[str, str] = {}

    def closed(self, each: Any) -> list[str]:
        """A closed list of calls; empty if there are only texts."""
        if not each["calls"]:
            return []
        begin, end = self._literal(each["begin"]), self._literal(each["end"])
        call = self._one(each["calls"])
        if each["separator"] is None:
            return [f"{begin} {call} {end}"]
        return [f"{begin} {call} ({self._literal(each['separator'])} {call})* {end}"]

    def last(self, each: Any) -> list[str]:
        """A list that ends with a text."""
        if not each["texts"]:
            return []
        begin, text = self._literal(each["begin"]), self._one(each["texts"])
        if each["separator"] is None or not each["calls"]:
            return [f"{begin} {text}"]
        call = self._one(each["calls"])
        return [f"{begin} ({call} {self._literal(each['separator'])})* {text}"]

    def _one(self, calls: list[Any]) -> str:
        return self._grammar.rule(_one_of([self.call(call) for call in calls]))

    def call(self, call: Any) -> str:
        """One call, with its beginning and end."""
        begin = " ".join(map(self._part, call["begin"]))
        return f"{begin} {self._content(call)} {self._literal(call.get('end', ''))}"

    def _part(self, part: Any) -> str:
        return self._literal(part) if isinstance(part, str) else self._grammar.regex(part["regex"])

    def _content(self, call: Any) -> str:
        grammar = self._grammar
        if "schema" in call:
            return f"{self._schema(call['schema'])} {grammar.space()}"
        if "fields" in call:
            return self._fields(call["fields"], call["separator"])
        if "until" in call:
            return grammar.text_until(call["until"], without=call["without"])
        return grammar.regex(call["regex"]) if "regex" in call else grammar.lark(call["lark"])

    def _schema(self, name: str) -> str:
        if name not in self._schema_rules:
            self._schema_rules[name] = self._grammar.schema(self._schemas[name])
        return self._schema_rules[name]

    def _fields(self, fields: list[Any], separator: str) -> str:
        """Named values in their order; ``more`` is for fields after another one, ``first`` is
        not."""
        between, rule = self._literal(separator), self._grammar.rule
        more, first = '""', '""'
        for each in reversed(fields):
            one = rule(self._field(each))
            following = more
            more = rule(self._unless_required(each, f"{between} {one} {following}", following))
            first = rule(self._unless_required(each, f"{one} {following}", first))
        return first

    def _unless_required(self, field: Any, present: str, absent: str) -> str:
        return present if field["required"] else _one_of([present, absent])

    def _field(self, field: Any) -> str:
        begin, before, end, after = (
            self._literal(field[name]) for name in ("begin", "before", "end", "after")
        )
        if "schema" in field:
            return f"{begin} {self._grammar.schema(field['schema'])} {before} {end} {after}"
        if "choice" in field:
            texts = _one_of([self._grammar.literal(text) for text in field["choice"]])
            return f"{begin} {texts} {before} {end} {after}"
        text = self._grammar.text_until(field["end"], without=field.get("without", ()))
        return f"{begin} {text} {after}"

    def _literal(self, text: str) -> str:
        return self._grammar.literal(text) if text else ""


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"
