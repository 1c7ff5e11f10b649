"""The formats of tool calls, by parser name, in the terms of the grammar that calls in free text
follow (``shared/engine/structured/calls_in_text.py``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....shared.text.tool_parsers import (
    deepseek,
    gemma,
    glm45,
    hermes,
    json_call,
    json_list,
    kimi_k2,
    mistral,
    pythonic,
    qwen3_xml,
)
from .plain_fields import FieldForm

Parts = list[Any]
# Python literals in a call. Names are constants, or strings without quotes.
PYTHON_ARGUMENTS = r"""
start: (argument ("," SPACE? argument)*)?
argument: NAME "=" value
value: STRING | NUMBER | NAME | "[" (value ("," SPACE? value)*)? "]"
     | "{" (item ("," SPACE? item)*)? "}"
item: STRING ":" SPACE? value
NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/
NUMBER: /-?[0-9]{1,40}(\.[0-9]{1,40})?/
STRING: /"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/
SPACE: /[ \n]/
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallList:
    """Calls after a ``trigger``, or after a match of ``opening``, with a ``separator`` unless there
    can only be one. ``head`` precedes the arguments of a call, ``close`` follows them."""

    trigger: str = ""
    opening: str = ""
    begin: str = ""
    head: Callable[[str], Parts]
    close: str = ""
    separator: str | None = None
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The lists that a parser reads. With ``anywhere`` they may follow other text, otherwise only
    one of the ``tags``. Arguments are JSON, unless there are ``fields``; the arguments of other
    functions are then ``free``: a grammar, or any text up to the end of the call. ``text_opening``
    precedes the text of an argument."""

    lists: Sequence[CallList]
    anywhere: bool = True
    tags: Sequence[str] = ()
    text_opening: Callable[[str], str] = json_call.text_opening
    fields: FieldForm | None = None
    free: dict[str, Any] | None = None


def _object(name: str, *, key: str = "arguments", brace: str = "{") -> Parts:
    return [f'{brace}"name": {json.dumps(name)}, "{key}": ']


def _name_head(name: str, *, before: str = "", after: str = "") -> Parts:
    return [f"{before}{name}{after}"]


_HERMES = CallForm(
    lists=[CallList(trigger=hermes.START, head=_object, close="}", end=f"\n{hermes.END}")]
)


def _after_object(key: str) -> CallForm:
    """Output that is an object, or an array of objects."""
    head = partial(_object, key=key, brace="")
    one = CallList(opening=r"\{", head=head, close="}")
    return CallForm(
        lists=[one, replace(one, opening=r"\[\s*\{", separator=", {", end="]")], anywhere=False
    )


_LLAMA = _after_object("parameters")
_ONE, _SEVERAL = _LLAMA.lists
_LLAMA = replace(
    _LLAMA, lists=[replace(_ONE, separator="; {"), _SEVERAL], tags=[json_list.PYTHON_TAG]
)


def _phi4() -> CallForm:
    """A list after a word that counts as text unless an object follows it."""
    one, several = _after_object("arguments").lists
    word = rf"{json_list.PHI4}\s*"
    lists = [replace(each, opening=word + each.opening) for each in (one, several)]
    return CallForm(lists=lists)


def _granite(trigger: str) -> CallList:
    return CallList(trigger=trigger, begin="[", head=_object, close="}", separator=", ", end="]")


def _sections(start: str, call: str, one: CallList) -> CallForm:
    """Calls between section markers, or without them."""
    section = replace(one, trigger=start, begin=call)
    return CallForm(lists=[section, replace(one, trigger=call, separator=None, end="")])


def _deepseek(head: Callable[[str], Parts], close: str, between: str) -> CallForm:
    one = CallList(
        head=head,
        close=close + deepseek.CALL_END,
        separator=between + deepseek.CALL,
        end=deepseek.END,
    )
    return _sections(deepseek.START, deepseek.CALL, one)


def _kimi_head(name: str) -> Parts:
    return [f"functions.{name}:", {"regex": "[0-9]{1,4}"}, kimi_k2.ARGUMENTS]


def _mistral_id_head(name: str) -> Parts:
    return [name + mistral.CALL_ID, {"regex": "[a-zA-Z0-9]{9}"}, mistral.ARGUMENTS]


def _mistral() -> CallForm:
    """An array of calls, or a name with an optional id."""
    array = _granite(mistral.START)
    arguments = partial(_name_head, after=mistral.ARGUMENTS)
    heads = (_name_head, arguments, _mistral_id_head)
    return CallForm(lists=[array, *(CallList(trigger=mistral.START, head=head) for head in heads)])


def _gemma(markers: gemma.GemmaMarkers) -> CallForm:
    one = CallList(
        trigger=markers.start,
        head=partial(_name_head, before="call:", after="{"),
        close="}" + markers.end,
    )
    return CallForm(
        lists=[one],
        text_opening=partial(gemma.text_opening, markers),
        fields=FieldForm(begin="{}:", quote=markers.quote, separator=",", scalars=True),
        free={"until": markers.end, "without": [markers.start]},
    )


_KIMI = _sections(
    kimi_k2.START,
    kimi_k2.CALL,
    CallList(head=_kimi_head, close=kimi_k2.CALL_END, separator=kimi_k2.CALL, end=kimi_k2.END),
)
_QWEN_FUNCTION = CallList(
    trigger=qwen3_xml.FUNCTION,
    head=partial(_name_head, after=">"),
    close=f"\n{qwen3_xml.FUNCTION_END}",
)
_QWEN_XML = CallForm(
    lists=[
        replace(
            _QWEN_FUNCTION,
            trigger=qwen3_xml.START,
            begin=qwen3_xml.FUNCTION,
            end=f"\n{qwen3_xml.END}",
        ),
        _QWEN_FUNCTION,
    ],
    text_opening=qwen3_xml.text_opening,
    fields=FieldForm(
        begin=f"\n{qwen3_xml.PARAMETER}{{}}>\n",
        before="\n",
        end=qwen3_xml.PARAMETER_END,
        raw=True,
        breaks=tuple(qwen3_xml.END_OF_VALUE.breaks),
    ),
    free={
        "until": qwen3_xml.FUNCTION_END,
        "without": [qwen3_xml.FUNCTION, qwen3_xml.START],
    },
)
_GLM = CallForm(
    lists=[CallList(trigger=glm45.START, head=partial(_name_head, after="\n"), close=glm45.END)],
    text_opening=glm45.text_opening,
    fields=FieldForm(
        begin=f"{glm45.KEY}{{}}{glm45.KEY_END}\n{glm45.VALUE}",
        end=glm45.VALUE_END,
        after="\n",
        raw=True,
        breaks=tuple(glm45.END_OF_VALUE.breaks),
    ),
    free={"until": glm45.END, "without": [glm45.START]},
)
_PYTHONIC = CallForm(
    lists=[
        CallList(
            opening=r"\[", head=partial(_name_head, after="("), close=")", separator=", ", end="]"
        )
    ],
    anywhere=False,
    tags=[pythonic.START],
    text_opening=pythonic.text_opening,
    fields=FieldForm(begin="{}=", separator=", ", names=re.compile(r"[^\W\d]\w*")),
    free={"lark": PYTHON_ARGUMENTS},
)

# The form of calls in channels is defined on the node.
FORMS: dict[str, CallForm] = {
    "deepseek_v3": _deepseek(
        partial(_name_head, before=f"function{deepseek.SEPARATOR}", after="\n```json\n"),
        f"\n{deepseek.FENCE}",
        "\n",
    ),
    "deepseek_v31": _deepseek(partial(_name_head, after=deepseek.SEPARATOR), "", ""),
    "functiongemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA4),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": CallForm(lists=[_granite(trigger) for trigger in json_list.GRANITE]),
    "granite4": _HERMES,
    "granite-20b-fc": CallForm(
        lists=[CallList(trigger=json_list.GRANITE_20B, head=_object, close="}")]
    ),
    "hermes": _HERMES,
    "json": replace(_after_object("arguments"), tags=[f"{json_list.FENCE}json", json_list.FENCE]),
    "kimi_k2": _KIMI,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _mistral(),
    "phi4_mini_json": _phi4(),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
}
