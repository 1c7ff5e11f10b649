"""The text that is compiled for a constraint on an output."""

from __future__ import annotations

import json
from typing import Any

from .calls_in_text import calls_in_text
from .grammar import GrammarError
from .grammar_text import GrammarText, TokenLiterals
from .params import GrammarKey
from .structural_tag import structural_tag


def constraint_text(key: GrammarKey, special: TokenLiterals) -> str:
    """The text to compile. Raises ``GrammarError``."""
    grammar = GrammarText(special)
    output = _output(grammar, key)
    if key.reasoning_end:
        reasoning = f"{grammar.text_until(key.reasoning_end)} {grammar.space()}"
        if key.reasoning_start:
            reasoning = f"({grammar.marker(key.reasoning_start)} {reasoning})?"
        output = f"{reasoning} {output}"
    return grammar.whole(output)


def _output(grammar: GrammarText, key: GrammarKey) -> str:
    match key.kind:
        case "json":
            return grammar.schema(_parsed(key.text), whitespace=key.whitespace)
        case "json_object":
            return grammar.schema({"type": "object"}, whitespace=key.whitespace)
        case "regex":
            return grammar.regex(key.text)
        case "choice":
            return grammar.choice(_parsed(key.text))
        case "structural_tag":
            return structural_tag(grammar, _parsed(key.text))
        case "tool_calls":
            return calls_in_text(grammar, _parsed(key.text))
        case _:
            return grammar.lark(key.text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from None
