"""Calls that a model may make follow their grammars and schemas in every format of calls."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.router.errors import RequestError
from tandem.router.openai.tools.grammars import ToolGrammar, with_grammars
from tandem.router.openai.tools.guided_calls import CHANNELS, GuidedTools
from tandem.shared.engine.structured.grammar import Grammar, GrammarError
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import StructuredOutputs
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.shared.text.tool_parsers.formats import FORMATS
from tandem.shared.text.tool_parsers.tool_text import ToolText
from tandem.shared.text.tool_parsers.tool_use import ToolUse
from tandem.tests.router.support import make_model

LARK = ToolGrammar(
    syntax="lark",
    definition='start: "a" ("\\n" /[b-d"<]{2}/)~1..3',
    argument="input",
    place="tools[0].format.definition",
)
PATCHED = 'a(\n[b-d"<]{2}){1,3}'
DAY = replace(LARK, syntax="regex", definition=r'[0-9]{2}\.|tod"ay', place="")
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["x", "y<"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "exact": {"type": "boolean"},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
GRAMMARS = {"patch": LARK, "day": DAY}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = with_grammars({"patch": {}, "day": {}, "count": STRICT, "now": NOTHING}, GRAMMARS)
PLACES = {"count": "tools[2].function.parameters"}
# What models write before the arguments.
OPENINGS = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    ),
    "deepseek_v31": ("I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",),
    "functiongemma": ("<start_function_call>call:NAME{",),
    "gemma4": ("I look.<|tool_call>call:NAME{",),
    "glm45": ("I look.\n<tool_call>NAME\n",),
    "glm47": ("<tool_call>NAME\n",),
    "granite": (
        '<|tool_call|>[{"name": "NAME", "arguments": ',
        '<tool_call> [{"name": "now", "arguments": {}}, {"name": "NAME", "arguments": ',
    ),
    "granite4": ('<tool_call>\n{"name": "NAME", "arguments": ',),
    "granite-20b-fc": ('Well <function_call> {"name": "NAME", "arguments": ',),
    "hermes": ('I look.\n<tool_call>\n{"name": "NAME", "arguments": ',),
    "json": (
        '{"name": "NAME", "arguments": ',
        '```json\n[{"name": "NAME", "arguments": ',
    ),
    "kimi_k2": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.NAME:1"
        "<|tool_call_argument_begin|>",
    ),
    "llama3_json": (
        '\n{"name": "NAME", "parameters": ',
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "NAME", "parameters": ',
    ),
    "llama4_json": ('[{"name": "NAME", "parameters": ',),
    "llama4_pythonic": ("<|python_start|>[NAME(", "[now(), NAME("),
    "mistral": (
        'I look.[TOOL_CALLS][{"name": "NAME", "arguments": ',
        "[TOOL_CALLS]NAME",
        "[TOOL_CALLS]NAME[ARGS]",
        "[TOOL_CALLS]NAME[CALL_ID]abcdefghi[ARGS]",
    ),
    "openai": (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.NAME <|constrain|>json<|message|>",
        " to=functions.NAME<|channel|>commentary json<|message|>",
    ),
    "phi4_mini_json": ('Use functools? functools[{"name": "NAME", "arguments": ',),
    "pythonic": ("[now(), NAME(",),
    "qwen3_coder": ("I look.<tool_call>\n<function=NAME>",),
    "qwen3_xml": ("<function=now>\n</function>\n<function=NAME>",),
}
TEXTS = ("", "Hello [you] {and} <me>: functools", "1 < 2 [TOOL", "[link](a) {b}")
FINAL = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


@pytest.fixture(scope="module", params=["tokens", "text"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: Any) -> LLGuidanceBackend:
    """The markers of the formats are special tokens, or text of the tokenizer."""
    markers = {marker for text_format in FORMATS.values() for marker in text_format.markers}
    special = sorted(markers - {"<|start|>", "<|end|>"}) if request.param == "tokens" else []
    special += ["<think>", "</think>"] if special else []
    folder: Path = make_model(tmp_path_factory.mktemp("model"), special=special)
    files = read_tokenizer_files(folder)
    size = 1 + max(files.vocabulary().values())
    return LLGuidanceBackend(files, size, [size - 1])


def guided(parser: str, **changes: Any) -> GuidedTools:
    options: dict[str, Any] = {"schemas": SCHEMAS, "grammars": GRAMMARS, "strict": PLACES}
    return GuidedTools(parser=parser, **options | changes)


def compile_tools(
    backend: LLGuidanceBackend, tools: GuidedTools, *, required: bool = False
) -> Grammar:
    constraint = tools.constraint(required=required)
    assert constraint is not None
    return backend.compile(StructuredOutputs(tool_calls=constraint.tool_calls).key())


def follows(backend: LLGuidanceBackend, grammar: Grammar, text: str) -> bool:
    """True if a text is the beginning of an output that is allowed."""
    try:
        grammar.matcher().advance(backend.encode(text))
    except GrammarError:
        return False
    return True


def sample_text(backend: LLGuidanceBackend, grammar: Grammar, opening: str, seed: int) -> str:
    """An output that begins with ``opening`` and goes on at random, to where it may first end."""
    place, draw = grammar.matcher(), random.Random(seed)
    tokens = backend.encode(opening)
    place.advance(tokens)
    while not place.accepting:
        mask = place.mask()
        allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
        tokens.append(draw.choice(allowed))
        place.advance(tokens[-1:])
        assert len(tokens) < 2000
    return b"".join(map(backend.text_of, tokens)).decode()


def calls_in(tools: GuidedTools, text: str) -> list[tuple[str, Any]]:
    arguments = {name: grammar.argument for name, grammar in tools.texts().items()}
    tool_text = ToolText(ToolUse(parser=tools.parser, schemas=tools.schemas, verbatim=arguments))
    calls: list[tuple[str, str]] = []
    for call in (
        call for delta in [*tool_text.push(text), *tool_text.flush()] for call in delta.calls
    ):
        name, before = (call.name, "") if call.name else calls.pop()
        calls.append((name, before + call.arguments))
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check(name: str, arguments: Any) -> None:
    if name == "count":
        jsonschema.validate(arguments, STRICT)
    elif name != "now":
        pattern = PATCHED if name == "patch" else DAY.definition
        assert re.fullmatch(pattern, arguments["input"]), arguments


def openings() -> list[Any]:
    return [
        pytest.param(parser, text, id=f"{parser}-{number}")
        for parser, texts in OPENINGS.items()
        for number, text in enumerate(texts)
    ]


def test_every_format_is_tested() -> None:
    assert OPENINGS.keys() == FORMATS.keys()


@pytest.mark.parametrize(("parser", "opening"), openings())
def test_random_arguments_obey(backend: LLGuidanceBackend, parser: str, opening: str) -> None:
    tools = guided(parser, strict=PLACES | {"now": ""})
    grammar = compile_tools(backend, tools)
    for seed in range(3):
        for name in SCHEMAS.keys() - {"now"}:
            text = sample_text(backend, grammar, opening.replace("NAME", name), seed)
            calls = calls_in(tools, text)
            assert name in [called for called, _ in calls[:2]], text
            for call in calls:
                check(*call)


@pytest.mark.parametrize(("parser", "opening"), openings())
def test_calls_of_unknown_functions_and_other_arguments_are_not_written(
    backend: LLGuidanceBackend, parser: str, opening: str
) -> None:
    tools = compile_tools(backend, guided(parser))
    assert follows(backend, tools, opening.replace("NAME", "now"))
    assert not follows(backend, tools, opening.replace("NAME", "then") + "{}")
    if "pythonic" in parser:
        assert follows(backend, tools, """[now(a=[1, {'b': "c)"}], d=true), now(), """)
    for wrong in ('{"kind": "z"', "kind='z'", "kind:<escape>z", 'kind:<|"|>z', "<arg_key>z", "\nz"):
        assert not follows(backend, tools, opening.replace("NAME", "count") + wrong)


@pytest.mark.parametrize("parser", sorted(FORMATS.keys() - {CHANNELS}))
def test_other_text_is_free(backend: LLGuidanceBackend, parser: str) -> None:
    grammar = compile_tools(backend, guided(parser))
    for text in TEXTS:
        if not (text.startswith("[link") and "pythonic" in parser):
            assert follows(backend, grammar, text), text


def test_messages_in_channels_are_free_unless_a_call_is_required(
    backend: LLGuidanceBackend,
) -> None:
    grammar = compile_tools(backend, guided(CHANNELS))
    assert follows(backend, grammar, FINAL) and not follows(backend, grammar, "Yes.")
    assert not follows(backend, grammar, FINAL.replace("analysis", "analysis to=functions.then"))
    assert grammar.matcher().accepting
    required = compile_tools(backend, guided(CHANNELS), required=True).matcher()
    assert not required.accepting
    required.advance(backend.encode(FINAL))
    assert not required.accepting


EARLY = {
    "hermes": '<tool_call>\n{"name": "count", "arguments": ARGUMENTS}\n</tool_call>',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.count:0"
        "<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "llama3_json": '<|python_tag|>{"name": "count", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]count[ARGS]ARGUMENTS",
}


@pytest.mark.parametrize("parser", sorted(EARLY))
@pytest.mark.parametrize("start", ["", "<think>"])
def test_a_call_in_the_reasoning_follows_its_grammar(
    backend: LLGuidanceBackend, parser: str, start: str
) -> None:
    """Where its marker is a token; otherwise it is text of the reasoning."""
    constraint = guided(parser).constraint()
    assert constraint is not None
    key = StructuredOutputs(
        tool_calls=constraint.tool_calls, reasoning_start=start, reasoning_end="</think>"
    ).key()
    grammar = backend.compile(key)
    is_token = len(backend.encode("</think>")) == 1
    good = EARLY[parser].replace("ARGUMENTS", '{"kind": "x", "count": 1}')
    wrong = EARLY[parser].replace("ARGUMENTS", '{"kind": "z", "count": 1}')
    before = f"{start}Hm {{}}. "
    for text in (before + good, f"{before}</think>\n{good}", f"{before}</think>Yes."):
        assert follows(backend, grammar, text), text
    assert follows(backend, grammar, before + wrong) is not is_token
    assert not follows(backend, grammar, f"{before}</think>{wrong}")
    for after in ("</think>", "\n</think>\n\nYes."):
        assert follows(backend, grammar, before + good + after)
    if is_token:
        assert not follows(backend, grammar, f"{before}{good}</think>.</think>")
    if parser != "llama3_json":
        assert follows(backend, grammar, f"{before}{good}\n{good}</think>")
        assert follows(backend, grammar, f"{before}{good}\n{wrong}") is not is_token


@pytest.mark.parametrize(
    ("parser", "schema", "what"),
    [
        ("gemma4", {"type": "object"}, "the nested argument 'a'"),
        ("qwen3_xml", {"type": "string", "pattern": "x"}, "'pattern' of a text"),
        ("glm45", {"anyOf": [{"type": "string", "maxLength": 3}]}, "'maxLength' of a text"),
        ("glm45", {"type": "string", "enum": []}, "an empty 'enum'"),
        ("glm45", {"enum": ["x", "a</arg_value>"]}, "the value 'a</arg_value>'"),
        ("qwen3_xml", {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "'oneOf' of a text"),
        ("qwen3_xml", {"minLength": 3}, "the untyped argument 'a'"),
        ("qwen3_xml", {"$ref": "#/$defs/none", "type": "string"}, "the reference '#/.defs/none'"),
        ("qwen3_xml", {"allOf": 5, "type": "string"}, "an 'allOf' that is no array"),
    ],
)
def test_what_a_format_cannot_follow_is_refused_by_name(
    parser: str, schema: dict[str, Any], what: str
) -> None:
    strict = {"type": "object", "properties": {"a": schema}}
    tools = guided(parser, schemas={"count": strict}, grammars={})
    with pytest.raises(RequestError, match=f"{what}.*'{parser}'.*'required'") as refused:
        tools.constraint()
    assert refused.value.param == PLACES["count"]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ({"anywhere": True}, "invalid constraint on tool calls: the key '"),
        (["anywhere"], "invalid constraint on tool calls: list indices must be integers"),
    ],
    ids=["a key is missing", "a value of another type"],
)
def test_an_invalid_constraint_is_refused_by_what_is_wrong_with_it(
    backend: LLGuidanceBackend, calls: Any, reason: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        backend.compile(StructuredOutputs(tool_calls=json.dumps(calls)).key())


def test_values_that_are_not_texts_are_json_everywhere(backend: LLGuidanceBackend) -> None:
    place = {"$ref": "#/$defs/place"}
    strict = {
        "type": "object",
        "properties": {"at": place, "text": {"type": "string"}},
        "$defs": {"place": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "required": ["at", "text"],
    }
    for parser, opening, text in (
        ("pythonic", "[count(", 'at=[1, 2], text="/a😀")]'),
        (
            "qwen3_xml",
            "<function=count>",
            "\n<parameter=at>\n[1, 2]\n</parameter>\n<parameter=text>\n/a😀\n</parameter>\n"
            "</function>",
        ),
    ):
        tools = guided(parser, schemas={"count": strict}, grammars={})
        grammar = compile_tools(backend, tools)
        assert follows(backend, grammar, opening + text)
        assert calls_in(tools, opening + text)[0][1] == {"at": [1, 2], "text": "/a😀"}
        assert not follows(backend, grammar, opening + text.replace("2", "2, 3"))


DEFINITIONS: dict[str, Any] = {
    "color": {"type": "string", "enum": ["red", "null", "5"], "title": "Color"},
    "text": {"type": "string", "description": "any"},
    "place": {
        "type": "object",
        "properties": {"at": {"type": "string"}, "next": {"$ref": "#/$defs/place"}},
        "additionalProperties": False,
    },
}
NULL = {"type": "null"}
INTEGER = {"type": "integer"}
# Of one argument each, as pydantic and others write them.
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"type": ["string", "integer", "array"]},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["a", "true", "[1]"]},
    {"enum": ["a", 1, None]},
    {"enum": [1, 2.5, False]},
    {"const": "5"},
    {"const": 5},
    {"anyOf": [{"type": "string"}, NULL], "default": None},
    {"anyOf": [INTEGER, NULL]},
    {"anyOf": [{"$ref": "#/$defs/color"}, NULL]},
    {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]},
    {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "array", "items": INTEGER}, NULL]},
    {"oneOf": [{"type": "string"}, {"type": "boolean"}]},
    {"allOf": [{"$ref": "#/$defs/place"}]},
    {"allOf": [{"$ref": "#/$defs/text"}], "title": "Text"},
    {"allOf": [{"type": ["string", "integer"]}, INTEGER]},
    {"$ref": "#/$defs/color"},
    {"$ref": "#/$defs/place"},
]
# What looks like the ends of values, and like other types.
FRAGMENTS = (
    *("</parameter>", "\n</parameter>\n", "\n</function>", "\n<parameter=b>\n", "</tool_call>"),
    *("</arg_value>", "\n<arg_key>", "\n</tool_call>", "<arg_key>b</arg_key>", "<escape>", '<|"|>'),
    *(
        '"',
        "'",
        "null",
        "true",
        "TRUE",
        "None",
        "5",
        "-1.5",
        "[1",
        "]",
        "{",
        "}",
        ",",
        "\\",
        "\n",
        " ",
    ),
)


@pytest.mark.parametrize("parser", ["gemma4", "glm45", "pythonic", "qwen3_xml"])
def test_what_a_schema_lets_models_write_is_read_as_valid(
    backend: LLGuidanceBackend, parser: str
) -> None:
    [opening, *_] = OPENINGS[parser]
    followed = 0
    for number, argument in enumerate(ARGUMENTS):
        strict = {
            "type": "object",
            "properties": {"a": argument, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": DEFINITIONS,
        }
        tools = guided(parser, schemas={"count": strict, "now": NOTHING}, grammars={})
        try:
            grammar = compile_tools(backend, tools)
        except RequestError:
            continue
        texts = [
            free_text(backend, grammar, opening.replace("NAME", "count"), 100 * number + seed)
            for seed in range(2)
        ]
        followed += any(texts)
        for text in filter(None, texts):
            arguments = [value for name, value in calls_in(tools, text) if name == "count"]
            jsonschema.validate(arguments[0], strict)
    assert followed >= len(ARGUMENTS) - (8 if parser == "gemma4" else 0)


def free_text(backend: LLGuidanceBackend, grammar: Grammar, opening: str, seed: int) -> str:
    """As ``drawn``, with fragments that may be misread; empty if it has no end."""
    place, draw = grammar.matcher(), random.Random(seed)
    tokens = backend.encode(opening)
    place.advance(tokens)
    while len(tokens) < 600:
        fragment = backend.encode(draw.choice(FRAGMENTS)) if draw.random() < 0.7 else [-1]
        for token in fragment:
            mask = place.mask()
            allowed = [one for one in range(8 * len(mask)) if mask[one >> 3] >> (one & 7) & 1]
            token = draw.choice(allowed) if token < 0 else token
            if token not in allowed:
                break
            tokens.append(token)
            place.advance([token])
            if place.accepting:
                return b"".join(map(backend.text_of, tokens)).decode()
    return ""
