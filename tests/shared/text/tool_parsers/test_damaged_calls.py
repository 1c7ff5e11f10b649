"""Calls that are cut, or lack a marker, or have one too often: in every format what is left of them
is a call or content, never both, and never looks like another call."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest

from tandem.shared.text.output import OutputParser
from tandem.shared.text.output_parser import output_parser
from tandem.shared.text.reasoning import NO_PARSER, PARSERS
from tandem.shared.text.tool_parsers.formats import FORMATS
from tandem.shared.text.tool_parsers.tool_use import ToolUse
from tandem.tests.shared.text.tool_parsers.recorded import (
    AROUND,
    OUTPUTS,
    SCHEMAS,
    VALUE_SCHEMA,
    VALUES,
    Recorded,
)

# Where a damaged text is cut as well.
STEP = 11
# Characters that come one by one before a cut, and in each piece before these: more than most
# markers have.
SINGLE = 16
# Markers without which a call is not seen to begin.
HEADS = {
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<arg_key>",
    "<function=",
    "<|tool_call_begin|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
}


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def outputs() -> list[object]:
    return [
        pytest.param(output, id=f"{output.parser}-{number}")
        for number, output in enumerate(OUTPUTS)
    ]


def read(parser: OutputParser | None, pieces: Iterable[str]) -> Parsed:
    assert parser is not None
    result = Parsed()
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    for delta in [*deltas, *parser.flush()]:
        result.content += delta.content
        result.reasoning += delta.reasoning
        for call in delta.calls:
            name, before = (call.name, "") if call.name else result.calls.pop()
            result.calls.append((name, before + call.arguments))
    return result


@cache
def parse_text(
    name: str,
    text: str,
    reasoning: str = NO_PARSER,
    opened: bool | None = None,
    in_pieces: bool = False,
) -> Parsed:
    """What is found in a text, whole and character by character, or ``in_pieces`` but for the last
    characters. Many damaged texts are cut before their damage."""
    tools = ToolUse(parser=name, schemas=SCHEMAS | {"f": VALUE_SCHEMA})
    whole = read(output_parser(reasoning, tools, opened=opened), [text])
    head = text[:-SINGLE] if in_pieces else ""
    pieces = [head[at : at + SINGLE] for at in range(0, len(head), SINGLE)]
    pieces += text[len(head) :]
    streamed = read(output_parser(reasoning, tools, opened=opened), pieces)
    assert whole == streamed, text
    for _, arguments in whole.calls[:-1]:
        assert isinstance(json.loads(arguments), dict), text
    return whole


def is_whole(arguments: str) -> bool:
    """True for arguments that are complete, and then an object; others must be open."""
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def check_cut(text: str, cut: Parsed, whole: Parsed) -> None:
    """A cut text has a beginning of what the whole has."""
    assert len(cut.calls) <= len(whole.calls), text
    for (name, arguments), (other, all_of_them) in zip(cut.calls, whole.calls, strict=False):
        assert name == other and all_of_them.startswith(arguments), text
        assert arguments == all_of_them or not is_whole(arguments), text
    if cut.calls:
        assert whole.content.startswith(cut.content.rstrip("<|endcal ")), text


@pytest.mark.parametrize("output", outputs())
def test_a_cut_call_is_open_and_leaves_no_markup(output: Recorded) -> None:
    text = f"{output.text}\n\n{output.text}" if output.content else output.text
    whole = parse_text(output.parser, text)
    for end in range(len(text)):
        check_cut(text[:end], parse_text(output.parser, text[:end], in_pieces=True), whole)


@pytest.mark.parametrize("output", outputs())
def test_a_missing_or_doubled_marker_leaves_no_markup(output: Recorded) -> None:
    markers = FORMATS[output.parser].markers
    for marker, damaged, doubled in damages(output):
        result = parse_text(output.parser, damaged)
        if doubled:
            assert (
                result.calls and result.calls[0] == parse_text(output.parser, output.text).calls[0]
            )
        if result.calls and (doubled or marker not in HEADS | set(FORMATS[output.parser].starts)):
            assert not any(each in result.content for each in markers), damaged
        for end in range(0, len(damaged), STEP):
            parse_text(output.parser, damaged[:end], in_pieces=True)


def damages(output: Recorded) -> Iterator[tuple[str, str, bool]]:
    """A marker, the text without it, and with it twice, at each place where it is."""
    text = output.text
    for marker in FORMATS[output.parser].markers if output.calls else ():
        for at in places(text, marker):
            yield marker, text[:at] + text[at + len(marker) :], False
            yield marker, text[:at] + marker + text[at:], True


def places(text: str, part: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(part, at)]


@pytest.mark.parametrize("output", outputs())
def test_a_misplaced_marker_breaks_nothing(output: Recorded) -> None:
    """Calls before the last are whole, and the last is if text follows it."""
    markers = FORMATS[output.parser].markers
    edges = sorted({at for marker in markers for at in places(output.text, marker)})
    for marker in markers:
        for at in edges:
            parse_text(output.parser, output.text[:at] + marker + output.text[at:])
        for at, other in pairwise(edges):
            parse_text(output.parser, output.text[:at] + marker + output.text[other:])


FRAGMENTS = (
    *(
        '{"name": "f", ',
        '"arguments": {',
        '"s": "x"',
        "null",
        "5",
        '"a"',
        "city",
        "s>\n",
        "n>3",
        "\n",
    ),
    *(
        "<think>",
        "</think>",
        "```",
        "functions.f:0",
        "call:f{",
        " to=functions.f",
        'f(s="a")',
        "é😀",
    ),
    *'{}[]",:;\\ <>=()',
)


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_is_read_the_same_in_any_pieces(seed: int) -> None:
    draw = random.Random(seed)
    for output in OUTPUTS:
        parts = list(output.text)
        fragments = [*FRAGMENTS, *FORMATS[output.parser].markers * 4]
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(parts) + 1)
            length = draw.choice((0, 0, draw.randint(1, 12)))
            parts[at : at + length] = draw.sample(fragments, k=draw.randint(0, 3))
        reasoning, opened = draw.choice((NO_PARSER, "qwen3")), draw.choice((True, False, None))
        result = parse_text(output.parser, "".join(parts), reasoning, opened)
        for name, arguments in result.calls:
            assert name.strip() and not arguments.strip().startswith(("[", '"'))


@pytest.mark.parametrize(("parser", "arguments", "expected"), VALUES)
def test_values_end_where_the_next_argument_begins(
    parser: str, arguments: str, expected: object
) -> None:
    before, after = AROUND[parser]
    result = parse_text(parser, f"a {before}{arguments}{after} b")
    assert [(name, json.loads(raw)) for name, raw in result.calls] == [("f", expected)]
    assert result.content.split() in (["a", "b"], ["ab"])


@pytest.mark.parametrize(("parser", "arguments", "expected"), VALUES)
def test_values_are_cut_before_their_end(parser: str, arguments: str, expected: object) -> None:
    before, _ = AROUND[parser]
    for end in range(0, len(arguments), 1 + len(arguments) // 100):
        cut = parse_text(parser, before + arguments[:end], in_pieces=True)
        assert not cut.content.strip()
        if "</tool_call>" not in arguments:
            assert not is_whole(cut.calls[0][1]) or json.loads(cut.calls[0][1]) == expected


@pytest.mark.parametrize("name", sorted(name for name, each in FORMATS.items() if each.starts))
def test_a_call_ends_the_reasoning(name: str) -> None:
    """Each kind of it, whoever opened it, and with its end behind the call."""
    text = call_start(name)
    alone = parse_text(name, text)
    assert alone.calls
    for reasoning, markers in PARSERS.items():
        for opened, before in ((True, "I will.\n"), (None, f"{markers.start}I will.\n")):
            for after in ("", f"\n{markers.end}\n\n"):
                result = parse_text(name, before + text + after, reasoning, opened)
                assert (result.reasoning, result.calls) == ("I will.\n", alone.calls)
                assert result.content.split() == alone.content.split()
    output = parse_text(name, f"I will.</think>{text}</think>!", "qwen3", True)
    assert (output.reasoning, output.content, output.calls) == (
        "I will.",
        f"{alone.content}!",
        alone.calls,
    )
    for end in range(0, len(text), 3):
        cut = parse_text(name, f"I will.{text[:end]}", "qwen3", True)
        check_cut(text[:end], cut, alone)


def call_start(name: str) -> str:
    """A recorded output, from the marker of its first call."""
    text = next(output.text for output in OUTPUTS if output.parser == name and output.calls)
    result = [text.index(start) for start in FORMATS[name].starts if start in text]
    return text[min(result) :] if result else FORMATS[name].starts[0] + text


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json", "pythonic", "qwen3_xml"])
def test_no_reasoning_begins_in_a_call(name: str) -> None:
    text = {
        "hermes": '<tool_call>{"arguments": {"s": "TEXT"}, "name": "f"}</tool_call>',
        "pythonic": '[f(s="TEXT")]',
        "qwen3_xml": "<tool_call><function=f><parameter=s>\nTEXT\n</parameter></function>",
    }.get(name, '{"name": "f", "parameters": {"s": "TEXT"}}')
    value = "<think>a</think> b"
    result = parse_text(name, text.replace("TEXT", value), "qwen3")
    assert [json.loads(raw) for _, raw in result.calls] == [{"s": value}]
    assert not result.reasoning and not result.content


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_long_nonsense_is_cheap(name: str) -> None:
    """To read a piece takes the same time, however many there were."""
    text = next(output.text for output in OUTPUTS if output.parser == name and output.calls)
    begin = text[: text.index("city") + 8] if "city" in text else text[: len(text) // 2]
    for part in (" ", '"', "a, ", "</parameter>\n", *FORMATS[name].markers[:2]):
        tools = ToolUse(parser=name, schemas=SCHEMAS)
        whole = begin + part * (10_000 // len(part))
        pieces = [whole[at : at + 3] for at in range(0, len(whole), 3)]
        before = time.thread_time()
        read(output_parser(NO_PARSER, tools), pieces)
        assert time.thread_time() - before < 0.7
