"""Free text with calls of tools, which follow their grammars.

``{"trigger": ..., "end": ..., "calls": [{"begin": ..., "schema": ...}], "texts": [{"begin": ...,
"lark": ...}]}``: each trigger is followed by one of the ``calls`` or ``texts``. A call is
followed by ``end``, and is any text if it has no schema; a text follows a Lark grammar or a
``regex``, and ends the output.
"""

from __future__ import annotations

from typing import Any

from .grammar import GrammarError
from .grammar_text import GrammarText


def calls_in_text(grammar: GrammarText, wanted: Any) -> str:
    """What an output consists of. Raises ``GrammarError``."""
    try:
        space, text = grammar.space(), grammar.text()
        trigger = grammar.text_until(wanted["trigger"])
        calls = [_call(grammar, each, wanted["end"]) for each in wanted["calls"]]
        texts = [_text(grammar, each) for each in wanted["texts"]]
    except (TypeError, KeyError) as error:
        raise GrammarError(f"the calls lack {error}") from None
    before = f"({trigger} {space} {_one_of(calls)})*" if calls else ""
    last = f"({text} | {trigger} {space} {_one_of(texts)})" if texts else text
    return f"{before} {last}"


def _call(grammar: GrammarText, call: Any, end: str) -> str:
    begin = grammar.literal(call["begin"])
    if "schema" not in call:
        return f"{begin} {grammar.text_until(end)}"
    return f"{begin} {grammar.schema(call['schema'])} {grammar.space()} {grammar.literal(end)}"


def _text(grammar: GrammarText, text: Any) -> str:
    content = grammar.regex(text["regex"]) if "regex" in text else grammar.lark(text["lark"])
    return f"{grammar.literal(text['begin'])} {content}"


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"
