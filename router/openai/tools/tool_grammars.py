"""Tools whose only argument is a text that follows a grammar: OpenAI's custom tools.

A regular expression is followed inside a JSON string. A context-free grammar cannot be, so the text
of such a call is written as it is, as the last of the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....proto import tandem_pb2 as pb
from ....shared.text.tool_parsers import hermes, qwen3_xml
from ....shared.text.tool_parsers.formats import FORMATS
from ....shared.text.tool_parsers.json_list import forced_opening, text_opening
from ....shared.text.tool_parsers.reader import Reader, Steps
from ....shared.text.tool_parsers.tool_use import ToolUse
from ..structured_outputs import constraint

Schemas = Mapping[str, Mapping[str, Any]]
_ANY_OBJECT = {"type": "object"}
# Parts of a regular expression whose parentheses are text.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """What the text of ``argument`` matches as a whole; errors name its ``place``."""

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
    """True if a group around a regular expression ends where that does."""
    open_groups = 0
    for character in re.sub("[^()]", "", _LITERAL.sub("", pattern)):
        open_groups += 1 if character == "(" else -1
        if open_groups < 0:
            return False
    return True


ToolGrammars = Mapping[str, ToolGrammar]
NO_GRAMMARS: ToolGrammars = {}


def with_grammars(schemas: Schemas, grammars: ToolGrammars) -> Schemas:
    """The schemas of functions; those with a grammar have that of their only argument."""
    made = {name: grammars[name].schema() for name in schemas if name in grammars}
    return {**schemas, **made}


def verbatim(grammars: ToolGrammars, names: Collection[str]) -> dict[str, ToolGrammar]:
    """The grammars of the functions with these names that JSON cannot follow."""
    found = {name: grammars[name] for name in names if name in grammars}
    return {name: grammar for name, grammar in found.items() if grammar.syntax == "lark"}


def place_of(grammars: ToolGrammars, names: Collection[str]) -> str:
    """The field that is wrong if the constraint on calls of these functions is."""
    places = [grammars[name].place for name in names if name in grammars]
    if not places:
        return "tool_choice"
    return places[0] if len(names) == 1 else "tools"


def calls_and_text(
    schemas: Schemas, texts: ToolGrammars, *, parallel: bool, param: str
) -> pb.StructuredOutputs:
    """An output that is an array of calls, of a single one unless they may be ``parallel``. The
    call of a function with a text is the last, and the array has no end after it. Raises
    ``RequestError``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A format of calls in free text, by its parser: the ``trigger`` of a call, what follows that
    up to the arguments, what comes before the text of one, and the ``end``. Arguments may be JSON,
    which can follow a regular expression."""

    parse: Callable[[Reader, ToolUse], Steps]
    trigger: str
    opening: Callable[[str], str]
    text_opening: Callable[[str], str]
    end: str
    in_json: bool

    def texts(self, grammars: ToolGrammars, names: Collection[str]) -> dict[str, ToolGrammar]:
        """The grammars of functions whose text is written as it is."""
        if self.in_json:
            return verbatim(grammars, names)
        return {name: grammars[name] for name in names if name in grammars}


FORMS = (
    CallForm(
        parse=hermes.hermes,
        trigger=hermes.START,
        opening=hermes.opening,
        text_opening=text_opening,
        end="}\n" + hermes.END,
        in_json=True,
    ),
    CallForm(
        parse=qwen3_xml.qwen3_xml,
        trigger=qwen3_xml.FUNCTION,
        opening=qwen3_xml.opening,
        text_opening=qwen3_xml.text_opening,
        end=qwen3_xml.FUNCTION_END,
        in_json=False,
    ),
)


def form_of(parser: str) -> CallForm | None:
    """The form of calls that a parser reads; ``None`` if it has no place for a text."""
    return next((form for form in FORMS if form.parse is FORMATS[parser].parse), None)


def calls_in_text(form: CallForm, schemas: Schemas, grammars: ToolGrammars) -> pb.StructuredOutputs:
    """An output of any text and of calls, of which those with a grammar follow it. Raises
    ``RequestError``."""
    texts = form.texts(grammars, schemas)
    calls: list[dict[str, Any]] = []
    for name in (name for name in schemas if name not in texts):
        schema = schemas[name] if name in grammars else _ANY_OBJECT
        calls.append({"begin": form.opening(name)} | ({"schema": schema} if form.in_json else {}))
    written = [
        {
            "begin": form.opening(name) + form.text_opening(grammar.argument),
            grammar.syntax: grammar.definition,
        }
        for name, grammar in texts.items()
    ]
    wanted = {"trigger": form.trigger, "end": form.end, "calls": calls, "texts": written}
    guided = [name for name in schemas if name in grammars]
    return constraint("tool_calls", wanted, place_of(grammars, guided))


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
