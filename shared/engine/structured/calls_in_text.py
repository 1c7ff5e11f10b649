"""Free text with calls of tools, which follow their grammars.

``{"trigger": ..., "end": ..., "calls": [{"begin": ..., "schema": ...}], "texts": [{"begin": ...,
"grammar": ...}]}``: each trigger is followed by one of the ``calls`` or ``texts``. Calls, which are
JSON, have the ``end`` behind them; a text is what a Lark grammar says, and ends the output.
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
        end = f"{space} {grammar.literal(wanted['end'])}"
        calls = [
            f"{grammar.literal(each['begin'])} {grammar.schema(each['schema'])} {end}"
            for each in wanted["calls"]
        ]
        texts = [
            f"{grammar.literal(each['begin'])} {grammar.lark(each['grammar'])}"
            for each in wanted["texts"]
        ]
    except (TypeError, KeyError) as error:
        raise GrammarError(f"the calls lack {error}") from None
    before = f"({trigger} {space} {_one_of(calls)})*" if calls else ""
    last = f"({text} | {trigger} {space} {_one_of(texts)})" if texts else text
    return f"{before} {last}"


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"
