"""Tools whose only argument is a text that follows a grammar: OpenAI's custom tools.

A regular expression applies inside a JSON string. A context-free grammar cannot, so the text of
such a call is written verbatim, at the end of the output.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....proto import tandem_pb2 as pb
from ....shared.text.tool_parsers.json_call import text_opening
from ....shared.text.tool_parsers.json_list import forced_opening
from ..structured_outputs import constraint

Schemas = Mapping[str, Mapping[str, Any]]
_ANY_OBJECT = {"type": "object"}
# Parts of a regular expression in which parentheses are literal.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """The grammar of the whole text of ``argument``; errors name its ``place``."""

    syntax: Literal["regex", "lark"]
    definition: str
    argument: str
    place: str

    def schema(self) -> dict[str, Any]:
        """The schema of the arguments."""
        text = {"type": "string"}
        if self.syntax == "regex":
            text["pattern"] = f"^(?:{self.definition})$"
        return {
            "type": "object",
            "properties": {self.argument: text},
            "required": [self.argument],
            "additionalProperties": False,
        }


def closes_only_its_groups(pattern: str) -> bool:
    """True if the pattern never closes a group that it has not opened, so that it can stand in a
    group."""
    open_groups = 0
    for character in re.sub("[^()]", "", _LITERAL.sub("", pattern)):
        open_groups += 1 if character == "(" else -1
        if open_groups < 0:
            return False
    return True


ToolGrammars = Mapping[str, ToolGrammar]
NO_GRAMMARS: ToolGrammars = {}


def with_grammars(schemas: Schemas, grammars: ToolGrammars) -> Schemas:
    """The schemas of functions; a function with a grammar has the schema of its only argument."""
    return {
        name: grammars[name].schema() if name in grammars else schema
        for name, schema in schemas.items()
    }


def verbatim(grammars: ToolGrammars, names: Collection[str]) -> dict[str, ToolGrammar]:
    """The context-free grammars of the functions with these ``names``."""
    return {
        name: grammars[name]
        for name in names
        if name in grammars and grammars[name].syntax == "lark"
    }


def place_of(grammars: ToolGrammars, names: Collection[str]) -> str:
    """The field for errors in the constraint on calls of these functions."""
    places = [grammars[name].place for name in names if name in grammars]
    if not places:
        return "tool_choice"
    return places[0] if len(names) == 1 else "tools"


def calls_and_text(
    schemas: Schemas, texts: ToolGrammars, *, parallel: bool, param: str
) -> pb.StructuredOutputs:
    """Output that is an array of calls: a single one unless ``parallel``. A call with a verbatim
    text is the last, and no bracket closes the array after it. Raises ``RequestError``."""
    last = [_text_call(name, grammar) for name, grammar in texts.items()]
    calls = [_call(name, schema) for name, schema in schemas.items() if name not in texts]
    parts = last
    if calls and parallel:
        several = {"type": "tags_with_separator", "separator": ",", "at_least_one": True}
        end = _one_of([_constant("]"), *(_sequence(_constant(","), text) for text in last)])
        parts = [*last, _sequence(several | {"tags": calls}, end)]
    elif calls:
        parts = [*last, *(_sequence(call, _constant("]")) for call in calls)]
    whole = _sequence(_constant("["), _one_of(parts))
    return constraint("structural_tag", {"format": whole}, param)


def _call(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {**(schema or _ANY_OBJECT), **_COMPACT}}
    return {"type": "tag", "begin": forced_opening(name), "content": content, "end": "}"}


def _text_call(name: str, grammar: ToolGrammar) -> dict[str, Any]:
    opening = forced_opening(name) + text_opening(grammar.argument)
    return _sequence(_constant(opening), {"type": "grammar", "grammar": grammar.definition})


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _one_of(elements: list[Any]) -> dict[str, Any]:
    return {"type": "or", "elements": elements}
