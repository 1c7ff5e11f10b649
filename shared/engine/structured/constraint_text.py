"""The grammar text of a constraint."""

from __future__ import annotations

import json
from typing import Any

from .calls_in_text import CallsInText
from .grammar import GrammarError
from .grammar_text import GrammarText, TokenLiterals
from .params import GrammarKey
from .structural_tag import structural_tag


def constraint_text(key: GrammarKey, special: TokenLiterals) -> str:
    """The grammar text to compile. Raises ``GrammarError``."""
    grammar = GrammarText(special)
    if key.kind != "tool_calls":
        return grammar.whole(_after_reasoning(grammar, key, _output(grammar, key), ""))
    try:
        calls = CallsInText(grammar, _parsed(key.text))
        early = calls.early(key.reasoning_end) if key.reasoning_end else ""
        return grammar.whole(_after_reasoning(grammar, key, calls.output(), early))
    except KeyError as error:
        raise GrammarError(
            f"invalid constraint on tool calls: the key {error} is missing"
        ) from None
    except (TypeError, AttributeError) as error:
        raise GrammarError(f"invalid constraint on tool calls: {error}") from None


def _after_reasoning(grammar: GrammarText, key: GrammarKey, output: str, early: str) -> str:
    """The output after its reasoning, or its ``early`` form, which begins within it."""
    if not key.reasoning_end:
        return output
    ended = f"{grammar.text_until(key.reasoning_end)} {grammar.space()} {output}"
    whole = f"({ended} | {early})" if early else ended
    if not key.reasoning_start:
        return whole
    return f"({grammar.marker(key.reasoning_start)} {whole} | {output})"


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
        case _:
            return grammar.lark(key.text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from None
