"""Tool parsers: every recorded output gives its calls, wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from tandem.shared.config import RouterConfig
from tandem.shared.text.detection import AUTO
from tandem.shared.text.output import TextDelta, join_deltas
from tandem.shared.text.tool_parsers.formats import FORMATS
from tandem.shared.text.tool_parsers.python_literal import literal_to_json
from tandem.shared.text.tool_parsers.tool_text import ToolText
from tandem.shared.text.tool_parsers.tool_use import ToolUse
from tandem.tests.shared.text.tool_parsers.recorded import (
    BROKEN,
    MALFORMED,
    OUTPUTS,
    SCHEMAS,
    Recorded,
)

LONGEST_MARKER = len(r"\n</parameter")


def parse_pieces(parser: str, pieces: Iterable[str], **options: Any) -> list[TextDelta]:
    stage = ToolText(ToolUse(parser=parser, schemas=SCHEMAS, **options))
    deltas = [delta for piece in pieces for delta in stage.push(piece)]
    return [*deltas, *stage.flush()]


def summary(deltas: list[TextDelta]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls. Checks that each call has its id and name once, first."""
    calls: list[list[str]] = []
    ids = set()
    for call in (call for delta in deltas for call in delta.calls):
        assert bool(call.id) == bool(call.name) == (call.index == len(calls))
        if call.name:
            calls.append([call.name, ""])
            ids.add(call.id)
        assert call.index == len(calls) - 1
        calls[-1][1] += call.arguments
    assert len(ids) == len(calls)
    content = "".join(delta.content for delta in deltas)
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.parser)
def test_recorded_outputs_give_their_calls_wherever_they_are_cut(output: Recorded) -> None:
    text = output.text
    whole = summary(parse_pieces(output.parser, [text]))
    content, calls = whole
    assert (content, [(name, json.loads(raw)) for name, raw in calls]) == (
        output.content,
        output.calls,
    )
    ids = tuple(call.id for delta in parse_pieces(output.parser, [text]) for call in delta.calls)
    assert set(output.ids) <= set(ids)
    reasoning = "".join(delta.reasoning for delta in parse_pieces(output.parser, list(text)))
    assert reasoning == output.reasoning
    for at in range(len(text)):
        assert summary(parse_pieces(output.parser, [text[:at], text[at:]])) == whole, at
    for step in (1, 2, 3, 7):
        edges = [*range(0, len(text), step), len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        assert summary(parse_pieces(output.parser, pieces)) == whole, step


@pytest.mark.parametrize(("parser", "text"), MALFORMED)
def test_malformed_calls_are_content(parser: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert summary(parse_pieces(parser, pieces)) == (text, [])


@pytest.mark.parametrize(("parser", "text", "calls", "content"), BROKEN)
def test_broken_calls_have_what_can_be_read_of_them(
    parser: str, text: str, calls: list[tuple[str, Any]], content: str
) -> None:
    for pieces in ([text], list(text)):
        output, result = summary(parse_pieces(parser, pieces))
        assert (output, [(name, json.loads(raw)) for name, raw in result]) == (content, calls)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.parser)
def test_outputs_that_end_early_keep_what_they_have(output: Recorded) -> None:
    """However a call is cut off, the names and arguments before the cut are those of the whole."""
    _, calls = summary(parse_pieces(output.parser, [output.text]))
    for end in range(len(output.text)):
        content, partial = summary(parse_pieces(output.parser, [output.text[:end]]))
        assert len(partial) <= len(calls)
        for (name, arguments), (whole_name, whole) in zip(partial, calls, strict=False):
            assert name == whole_name
            # The beginning of a marker may be a part of the text.
            assert whole.startswith(arguments[: max(1, len(arguments) - LONGEST_MARKER)])
        if not partial:
            assert (
                content == output.text[:end]
                or output.parser == "openai"
                or content.startswith(output.content)
            )


def test_without_parallel_calls_only_the_first_counts() -> None:
    [output] = [output for output in OUTPUTS if len(output.calls) > 1][:1]
    content, calls = summary(parse_pieces(output.parser, list(output.text), parallel=False))
    assert content == output.content
    assert [(name, json.loads(raw)) for name, raw in calls] == output.calls[:1]


def test_text_after_a_call_is_in_a_delta_of_its_own() -> None:
    text = 'a<tool_call>{"name": "now"}</tool_call>b<tool_call>{"name": "now"}</tool_call>'
    places = [
        (delta.content, len(delta.calls))
        for delta in join_deltas(parse_pieces("hermes", list(text)))
    ]
    assert places == [("a", 1), ("b", 1)]


def test_the_router_s_option_lists_every_parser() -> None:
    option = RouterConfig.__dataclass_fields__["tool_call_parser"]
    assert set(option.metadata["choices"]) == {AUTO, *FORMATS}
    assert option.default == AUTO


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s', \"b\": [1, 'x']}", {"a": "it's", "b": [1, "x"]}),
        ("[" + "'" + "y" * 60_000 + "', 1]", ["y" * 60_000, 1]),
        ('{\'code\': """say(f\'it\'s {x}\')"""}', {"code": "say(f'it's {x}')"}),
    ],
)
def test_a_literal_may_have_long_strings(text: str, expected: Any) -> None:
    assert json.loads(literal_to_json(text)) == expected


# Each takes Python's parser 20 ms and more.
@pytest.mark.parametrize("part", ["1,", "{},", "'a',", 'f"{1}",', "rF'{1:{2}}',", "1+"])
def test_a_literal_that_takes_long_to_parse_is_rejected(part: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        literal_to_json(f"[{part * 4000}]")


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "llama3_json"])
def test_endless_white_space_is_content(parser: str) -> None:
    texts = ["x", *[" " * 100] * 2000, "y"]
    parts = [delta.content for delta in parse_pieces(parser, texts)]
    assert "".join(parts) == "".join(texts)


def test_endless_white_space_in_a_call_ends_it() -> None:
    texts = ["<tool_call>", *[" " * 1000] * 200]
    deltas = parse_pieces("hermes", texts)
    assert "".join(delta.content for delta in deltas) == "".join(texts)
    # It is not held back until the end.
    assert len(deltas) > 1
