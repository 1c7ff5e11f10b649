"""Text with calls of tools, which follow their grammars.

``lists`` are the ways to write calls: after a ``trigger`` anywhere in the text, or after an
``opening``, a regular expression. ``anywhere`` says whether an opening may follow other text, or
only begin the output, perhaps behind one of ``tags``. A list is ``{"begin": ..., "calls": [...],
"separator": ..., "end": ..., "texts": [...]}``: calls between ``begin`` and ``end``, only one if
there is no separator. A text ends the output, so its list has no end.

The ``begin`` of a call is a list of texts and ``{"regex": ...}``. Its content is a ``schema``, by
its name in ``schemas``; ``fields``; a grammar (``lark``), a ``regex``, or any text up to ``until``
that is ``without`` other markers.
"""

from __future__ import annotations

import re
from typing import Any

from .channels import calls_in_channels
from .grammar import GrammarError
from .grammar_text import GrammarText

# White space as the parsers of calls skip it.
_SPACES = r"[\s\x1c-\x1f]*"


def calls_in_text(grammar: GrammarText, wanted: Any) -> str:
    """What an output consists of. Raises ``GrammarError``."""
    try:
        write = _CallWriter(grammar, wanted)
        if "channels" in wanted:
            return calls_in_channels(grammar, wanted["channels"], write.call)
        if wanted["anywhere"]:
            return _anywhere(grammar, wanted["lists"], write)
        return _at_start(grammar, wanted["lists"], wanted["tags"], write)
    except (TypeError, KeyError, AttributeError) as error:
        raise GrammarError(f"the calls lack {error}") from None


def _anywhere(grammar: GrammarText, lists: list[Any], write: _CallWriter) -> str:
    """Any text, in which each trigger is followed by calls."""
    closed, last = [], [grammar.text()]
    for each in lists:
        until = _until(grammar, each)
        closed += [f"{until} {grammar.space()} {calls}" for calls in write.closed(each)]
        last += [f"{until} {grammar.space()} {calls}" for calls in write.last(each)]
    before = f"{_one_of(closed)}*" if closed else ""
    return f"{before} {_one_of(last)}"


def _until(grammar: GrammarText, each: Any) -> str:
    if "trigger" in each:
        return grammar.text_until(each["trigger"])
    return grammar.lazy(f"(.|\\n)*{each['opening']}")


def _at_start(grammar: GrammarText, lists: list[Any], tags: list[str], write: _CallWriter) -> str:
    """Calls, or a text that does not begin as they do."""
    tokens = [tag for tag in tags if grammar.is_token(tag)]
    written = "|".join(re.escape(tag) for tag in tags if tag not in tokens)
    before = f"{_SPACES}(({written}){_SPACES})?" if written else _SPACES
    calls = [(each["opening"], write.closed(each) + write.last(each)) for each in lists]
    space = grammar.space()
    ways = [f"{grammar.lazy(before + opening)} {space} {_one_of(c)}" for opening, c in calls]
    tagged = [f"{grammar.lazy(_SPACES + opening)} {space} {_one_of(c)}" for opening, c in calls]
    ways += [f"{space} {grammar.literal(tag)} {_one_of(tagged)}" for tag in tokens]
    openings = "|".join(opening for opening, _ in calls)
    return f"{_one_of([*ways, grammar.text_unless(f'{before}({openings})')])}?"


class _CallWriter:
    """Writes calls, each schema of them once."""

    def __init__(self, grammar: GrammarText, wanted: Any) -> None:
        self._grammar = grammar
        self._schemas = wanted["schemas"]
        self._known: dict[str, str] = {}

    def closed(self, each: Any) -> list[str]:
        """A list of calls that ends; none if there are only texts."""
        if not each["calls"]:
            return []
        begin, end = self._literal(each["begin"]), self._literal(each["end"])
        call = self._one(each["calls"])
        if each["separator"] is None:
            return [f"{begin} {call} {end}"]
        return [f"{begin} {call} ({self._literal(each['separator'])} {call})* {end}"]

    def last(self, each: Any) -> list[str]:
        """A list whose end is a text."""
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
        if name not in self._known:
            self._known[name] = self._grammar.schema(self._schemas[name])
        return self._known[name]

    def _fields(self, fields: list[Any], separator: str) -> str:
        """Values with names, in their order; ``more`` follows others, ``first`` does not."""
        between, rule = self._literal(separator), self._grammar.rule
        more, first = '""', '""'
        for each in reversed(fields):
            one = rule(self._field(each))
            following = more
            more = rule(self._unless_required(each, f"{between} {one} {following}", following))
            first = rule(self._unless_required(each, f"{one} {following}", first))
        return first

    def _unless_required(self, field: Any, written: str, left_out: str) -> str:
        return written if field["required"] else _one_of([written, left_out])

    def _field(self, field: Any) -> str:
        begin, before, end, after = (
            self._literal(field[name]) for name in ("begin", "before", "end", "after")
        )
        if "schema" in field:
            return f"{begin} {self._grammar.schema(field['schema'])} {before} {end} {after}"
        if "choice" in field:
            texts = _one_of([self._grammar.literal(text) for text in field["choice"]])
            return f"{begin} {texts} {before} {end} {after}"
        return f"{begin} {self._grammar.text_until(field['end'])} {after}"

    def _literal(self, text: str) -> str:
        return self._grammar.literal(text) if text else ""


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"
