"""Outputs of models in each format of tool calls, with the calls that they contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, Any]]

# The tools of all recorded outputs.
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "place": {"type": "object"},
            "note": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Recorded:
    """One output; ``content`` is its text beside the calls."""

    parser: str
    text: str
    calls: Calls
    content: str = ""
    ids: tuple[str, ...] = ()
    reasoning: str = ""


PARIS: tuple[str, Any] = ("get_weather", {"city": 'Paris, "FR" {x}', "days": 2})
PARIS_JSON = '{"city": "Paris, \\"FR\\" {x}", "days": 2}'
NOW: tuple[str, Any] = ("now", {})
DAYS: tuple[str, Any] = ("get_weather", {"days": 2})
OSLO: tuple[str, Any] = ("get_weather", {"city": "Oslo"})
RICH: tuple[str, Any] = (
    "get_weather",
    {"city": "two\nlines\t<b>", "metric": True, "place": {"lat": 1.5, "tags": ["a", None]}},
)

OUTPUTS = (
    Recorded(
        "hermes",
        "I look it up.\n\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [PARIS, NOW],
        "I look it up.",
    ),
    Recorded(
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Oslo\\"}", "id": 7, "name": "get_weather"}'
        "</tool_call> Done.\n",
        [OSLO],
        " Done.",
    ),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    # Without the last brace.
    Recorded("hermes", '<tool_call>{"name": "now", "arguments": {}\n</tool_call>', [NOW]),
    Recorded("granite4", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>\n', [NOW]),
    Recorded(
        "qwen3_xml",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\ntwo\nlines\t<b>\n"
        "</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=place>\n"
        '{"lat": 1.5, "tags": ["a", null]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [RICH, NOW],
        "Sure.",
    ),
    Recorded(
        "qwen3_coder",
        "<function=get_weather><parameter=city>Oslo</parameter><parameter=note>\nnull\n"
        "</parameter><parameter=extra>7</parameter></function>",
        [("get_weather", {"city": "Oslo", "note": None, "extra": "7"})],
    ),
    Recorded(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>two\nlines\t<b>"
        "</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n"
        "<arg_key>place</arg_key>\n<arg_value>{'lat': 1.5, 'tags': ['a', None]}</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        [RICH, NOW],
        "I look.",
    ),
    Recorded(
        "glm47",
        "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Oslo</arg_value><arg_key>extra</arg_key><arg_value>7</arg_value></tool_call>",
        [NOW, ("get_weather", {"city": "Oslo", "extra": 7})],
    ),
    Recorded(
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS_JSON}}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
        [PARIS, NOW],
    ),
    Recorded("llama4_json", '\n{"name": "now", "parameters": {}}', [NOW]),
    Recorded(
        "pythonic",
        "[get_weather(city='Paris, \"FR\" {x}', days=2), now()]",
        [PARIS, NOW],
    ),
    Recorded(
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="two\\nlines\\t<b>", metric=true, '
        "place={'lat': 1.5, 'tags': ['a', None]})]<|python_end|>",
        [RICH],
    ),
    Recorded(
        "pythonic",
        "[get_weather(days=-2, city=('a', \"b)\"), )]",
        [("get_weather", {"days": -2, "city": ["a", "b)"]})],
    ),
    Recorded(
        "mistral",
        f'I look.[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS_JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        [PARIS, NOW],
        "I look.",
    ),
    Recorded("mistral", f"[TOOL_CALLS]get_weather{PARIS_JSON}[TOOL_CALLS]now{{}}", [PARIS, NOW]),
    Recorded(
        "mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        [PARIS, NOW],
        ids=("abcdefghi",),
    ),
    Recorded(
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{PARIS_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
        "I look.",
    ),
    Recorded(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{PARIS_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
    ),
    Recorded(
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {PARIS_JSON}}}, {{"name": "now"}}]',
        [PARIS, NOW],
    ),
    Recorded(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>two\nlines\t<b><escape>,metric:true,"
        "place:{lat:1.5,tags:[<escape>a<escape>,null]}}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        [RICH, NOW],
    ),
    Recorded(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|><|"|>,note:<|"|>a<|"|>}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|><|"|>}<tool_call|>',
        [("get_weather", {"city": "", "note": "a"}), ("get_weather", {"city": ""})],
    ),
    Recorded(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris, "FR" {x}<|"|>,days:2}<tool_call|>Done',
        [PARIS],
        "Done",
    ),
    Recorded(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS_JSON}}}, '
        '{"name": "now", "arguments": {}}]',
        [PARIS, NOW],
    ),
    Recorded("granite", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', [NOW]),
    Recorded(
        "granite-20b-fc",
        f'<function_call> {{"name": "get_weather", "arguments": {PARIS_JSON}}} '
        '<function_call> {"name": "now", "arguments": {}}',
        [PARIS, NOW],
    ),
    Recorded(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
        f"<|tool_call_argument_begin|>{PARIS_JSON}<|tool_call_end|><|tool_call_begin|>"
        "functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, NOW],
        "I look.",
        ids=("functions.get_weather:3", "functions.now:4"),
    ),
    Recorded(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [NOW, NOW],
        ids=("functions.now:0", "functions.now:1"),
    ),
    Recorded(
        "openai",
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS_JSON}<|call|>",
        [PARIS],
        "I look.",
        reasoning="Let me see.",
    ),
    Recorded("openai", "<|channel|>final<|message|>Done.<|return|>", [], "Done."),
    Recorded(
        "openai",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [NOW],
    ),
    Recorded(
        "json",
        f'```json\n[{{"name": "get_weather", "parameters": {PARIS_JSON}}},\n {{"name": "now"}}]\n'
        "```\nDone",
        [PARIS, NOW],
        "\nDone",
    ),
    Recorded("json", '{"name": "now", "arguments": {}}', [NOW]),
)

# Texts that promise a call and contain none: all of it stays content.
MALFORMED = (
    ("hermes", "a <tool_call> b </tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call> x'),
    ("hermes", '<tool_call>{"name": "now'),
    ("hermes", "1 < 2 <tool"),
    ("qwen3_xml", "<tool_call>\nhello</tool_call>"),
    ("qwen3_xml", "<function=" + "x" * 300 + ">"),
    ("glm45", '<tool_call>{"name": "now"}\n</tool_call>'),
    ("glm45", "<tool_call>now"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '  {"a": [1, 2]} and more'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[1, 2, 3] is a list"),
    ("pythonic", "[link](https://example.org/?a=b)"),
    ("pythonic", "[get_weather"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] no call at all"),
    ("mistral", '[TOOL_CALLS][{"nam": "now"}]'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}"),
    ("phi4_mini_json", "import functools\nfunctools.cache"),
    ("functiongemma", "<start_function_call>now{}<end_function_call>"),
    ("gemma4", "<|tool_call>call:now"),
    ("granite", "<|tool_call|>[]"),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0"),
    ("json", '```json\n{"a": 1}\n```'),
    ("json", "Hello {you}"),
    ("openai", "Hello <|message|>"),
    ("openai", "<|channel|>final"),
    ("json", '[{"name": "unknown", "arguments": {}}]'),
)

# Calls that are not written as they should be: what can be read of them, and the content.
BROKEN: tuple[tuple[str, str, Calls, str], ...] = (
    ("hermes", '<tool_call>{"name": "now", x}</tool_call> y', [NOW], " y"),
    ("hermes", '<tool_call>{"name": "now", "arguments": 5}</tool_call>', [NOW], ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": [{"a": 1}]}</tool_call>', [NOW], ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": "no"}</tool_call>', [NOW], ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": }</tool_call>', [NOW], ""),
    ("hermes", '<tool_call>{"name": "now"</tool_call>', [NOW], ""),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": "b",{" " * 3000}"c": 1}}}}</tool_call>',
        [("f", {"a": "b", "c": 1})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "He said "hi", then "bye" now"}}</tool_call>',
        [("f", {"s": 'He said "hi", then "bye" now'})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "a\nb\t\\d \\u12", n: 1}}}</tool_call>',
        [("f", {"s": "a\nb\t\\d \\u12", "n": 1})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2 "b",, True,}}</tool_call>',
        [("f", {"a": [1, 2, "b", True]})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1</tool_call>'
        '<tool_call>{"name": "f", "arguments": {"c": "d"<tool_call>{"name": "now"}</tool_call>',
        [("f", {"a": {"b": 1}}), ("f", {"c": "d"}), NOW],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x"}</tool_call>',
        [("f", {"a": "x"})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call></tool_call>\n</tool_call>x', [NOW], "\nx"),
    ("hermes", '<tool_call>\n<tool_call>{"name": "now"}\nx</tool_call>y', [NOW], "xy"),
    ("pythonic", "[now(1), now(1, a b), get_weather(0=1, days=2)]x", [NOW, NOW, DAYS], "x"),
    ("gemma4", "<|tool_call>call:now{a b:c:d, e} x", [("now", {"a b": "c:d", "e": None})], "x"),
    ("qwen3_xml", "<tool_call><function=now>text</function></tool_call>", [NOW], ""),
)

# Values in plain text that end without their marker, or contain it; each inside of a call of f.
VALUES: tuple[tuple[str, str, Any], ...] = (
    (
        "qwen3_xml",
        "<parameter=s>\nhi\n<parameter=n>\n3\n</parameter>\n</function>",
        {"s": "hi", "n": 3},
    ),
    ("qwen3_xml", "<parameter=n>\n3\n</function>", {"n": 3}),
    ("qwen3_xml", "<parameter=s>\nhi\n</function>", {"s": "hi"}),
    (
        "qwen3_xml",
        "<parameter=s>\nends with </parameter> here\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>",
        {"s": "ends with </parameter> here", "n": 3},
    ),
    (
        "qwen3_xml",
        "<parameter=s>\na </tool_call> b </function>\n</function> c\n</tool_call>\n\n</parameter>\n"
        "</function>",
        {"s": "a </tool_call> b </function>\n</function> c\n</tool_call>\n"},
    ),
    (
        "qwen3_xml",
        "<parameter=<parameter=s>\nhi\n</parameter></parameter>\n</parameter><parameter=n>3"
        "</parameter></function></function>",
        {"s": "hi", "n": 3},
    ),
    (
        "qwen3_xml",
        "x\n</parameter>\n<parameter=s\nhi</parameter></tool_call>\n<parameter=n>3</parameter>\n",
        {"s": "hi", "n": 3},
    ),
    (
        "qwen3_xml",
        '<parameter=o>{"a": "</parameter></function>\\\\", "b": [1]}</parameter></function>',
        {"o": {"a": "</parameter></function>\\", "b": [1]}},
    ),
    (
        "qwen3_xml",
        '<parameter=o>\n{"a": "</parameter>\n</function>',
        {"o": '{"a": "'},
    ),
    ("qwen3_xml", "<parameter=z>\nnull\n</parameter>\n</function>", {"z": None}),
    ("qwen3_xml", "<parameter=z>\nnull!\n</parameter>\n</function>", {"z": "null!"}),
    ("qwen3_xml", f"<parameter=z>\n{' ' * 2000}\n</parameter>\n</function>", {"z": " " * 2000}),
    (
        "glm45",
        "<arg_key>s</arg_key>\n<arg_value>hi\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n",
        {"s": "hi", "n": 3},
    ),
    ("glm45", "<arg_key>n</arg_key>\n<arg_value>3\n", {"n": 3}),
    (
        "glm45",
        "<arg_key>s</arg_key>\n<arg_value>a </tool_call> </arg_value> b</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n",
        {"s": "a </tool_call> </arg_value> b", "n": 3},
    ),
    (
        "glm45",
        "x</arg_value><arg_key>s<arg_value>hi</arg_value></tool_call><arg_key>n</arg_key>3"
        "</arg_value>\n",
        {"s": "hi", "n": 3},
    ),
)
AROUND = {
    "qwen3_xml": ("<tool_call>\n<function=f>\n", "\n</tool_call>"),
    "glm45": ("<tool_call>f\n", "</tool_call>"),
}
VALUE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"$ref": "#/$defs/object"},
        "z": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"object": {"type": "object"}},
}
