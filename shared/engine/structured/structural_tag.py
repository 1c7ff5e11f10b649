"""Structural tags: text with constrained parts, in the formats of vLLM and xgrammar.

A format is an object with a ``type``, and may contain other formats. The older form has
``triggers`` and ``structures`` instead, and means ``triggered_tags``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .grammar import GrammarError
from .grammar_text import GrammarText

Format = dict[str, Any]


def structural_tag(grammar: GrammarText, tag: Any) -> str:
    """The expression of an output. Raises ``GrammarError``."""
    if not isinstance(tag, dict):
        raise GrammarError("a structural tag must be an object")
    if "structures" in tag:
        tags = [_older(one) for one in _list(tag, "structures")]
        return _triggered(grammar, {**tag, "tags": tags})
    return _expression(grammar, tag.get("format", tag))


def _older(structure: Any) -> Format:
    if not isinstance(structure, dict):
        raise GrammarError("a structure must be an object")
    schema = structure.get("schema", True)
    content = {"type": "json_schema", "json_schema": schema}
    return {**structure, "content": content}


def _expression(grammar: GrammarText, part: Any) -> str:
    if not isinstance(part, dict):
        raise GrammarError("a format of a structural tag must be an object")
    write = _FORMATS.get(kind := str(part.get("type")))
    if write is None:
        formats = ", ".join(_FORMATS)
        raise GrammarError(f"the format {kind!r:.64} is not supported; supported: {formats}")
    return write(grammar, part)


def _constant(grammar: GrammarText, part: Format) -> str:
    return grammar.literal(_string(part, "value"))


def _schema(grammar: GrammarText, part: Format) -> str:
    return grammar.schema(part.get("json_schema"))


def _regex(grammar: GrammarText, part: Format) -> str:
    return grammar.regex(_string(part, "pattern"))


def _lark(grammar: GrammarText, part: Format) -> str:
    return grammar.lark(_string(part, "grammar"))


def _any_text(grammar: GrammarText, part: Format) -> str:
    _only(part, "type")
    return grammar.text()


def _sequence(grammar: GrammarText, part: Format) -> str:
    """The elements in turn. Free text ends at the constant that follows."""
    elements = _list(part, "elements")
    parts, ends = [], False
    for element, following in zip(elements, [*elements[1:], {}], strict=True):
        ended, ends = ends, _is(element, "any_text") and _is(following, "const_string")
        if ends:
            parts.append(grammar.text_until(_string(following, "value")))
        elif not ended:
            parts.append(_expression(grammar, element))
    return " ".join(parts)


def _or(grammar: GrammarText, part: Format) -> str:
    return _one_of([_expression(grammar, one) for one in _list(part, "elements")])


def _tag(grammar: GrammarText, part: Format) -> str:
    return f"{grammar.literal(_string(part, 'begin'))} {_rest(grammar, part)}"


def _rest(grammar: GrammarText, part: Format) -> str:
    """A tag's content and end."""
    content, end = part.get("content"), part.get("end")
    ends = [_checked(one, "end") for one in (end if isinstance(end, list) else [end])]
    if _is(content, "any_text") and all(ends):
        return _one_of([grammar.text_until(one) for one in ends])
    return f"{_expression(grammar, content)} {_one_of([grammar.literal(one) for one in ends])}"


def _triggered(grammar: GrammarText, part: Format) -> str:
    """Free text, in which each trigger begins one of the tags; with ``at_least_one`` the output
    begins with a tag, and with ``stop_after_first`` it ends after the first."""
    triggers = [_checked(one, "triggers") for one in _list(part, "triggers")]
    tags = _list(part, "tags")
    stop_after_first, at_least_one = (
        part.get("stop_after_first") is True,
        part.get("at_least_one") is True,
    )
    by_trigger: dict[str, list[str]] = {}
    for tag in tags:
        begin = _string(tag, "begin")
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if trigger is None:
            raise GrammarError(f"the tag {begin!r:.64} begins with none of the triggers")
        rest = f"{grammar.literal(begin[len(trigger) :])} {_rest(grammar, tag)}"
        by_trigger.setdefault(trigger, []).append(rest)
    ways = [f"{grammar.text_until(t)} {_one_of(rests)}" for t, rests in by_trigger.items()]
    in_text = grammar.rule(_one_of(ways))
    first = _one_of([_tag(grammar, tag) for tag in tags]) if at_least_one else ""
    if stop_after_first:
        return first or _one_of([in_text, grammar.text()])
    return f"{first} {in_text}* {grammar.text()}"


def _separated(grammar: GrammarText, part: Format) -> str:
    """Tags with a separator between them."""
    tag = grammar.rule(_one_of([_tag(grammar, tag) for tag in _list(part, "tags")]))
    more = f"({grammar.literal(_string(part, 'separator'))} {tag})*"
    several = tag if part.get("stop_after_first") is True else f"({tag} {more})"
    return several if part.get("at_least_one") is True else f"{several}?"


_FORMATS: dict[str, Callable[[GrammarText, Format], str]] = {
    "const_string": _constant,
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _lark,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}


def _one_of(expressions: list[str]) -> str:
    return f"({' | '.join(expressions)})"


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _only(part: Format, *names: str) -> None:
    for name in part.keys() - set(names):
        raise GrammarError(f"{name!r:.64} of {part['type']} is not supported")


def _string(part: Any, name: str) -> str:
    if not isinstance(part, dict):
        raise GrammarError("a tag must be an object")
    return _checked(part.get(name), name)


def _checked(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise GrammarError(f"{name!r} of a structural tag must be a string")
    return value


def _list(part: Format, name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name!r} of a structural tag must be a non-empty list")
    return value
