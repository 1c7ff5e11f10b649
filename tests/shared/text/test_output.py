"""The text of a choice: stop strings and parsers, however tokens cut the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.config import RouterConfig
from tandem.shared.text.detection import AUTO
from tandem.shared.text.output import OutputText, TextDelta
from tandem.shared.text.reasoning import HARMONY, NO_PARSER, PARSERS, opened_by, reasoning_parser
from tandem.tests.shared.text.test_stop import cut

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "/", "a", "\n", "<think", "</"]),
    max_size=12,
)


class NumberedPieces:
    """A detokenizer whose tokens are numbers of pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


def split(name: str, text: str) -> TextDelta:
    """The result for a whole text, by plain searches."""
    markers = PARSERS[name]
    before = ""
    if not markers.opened:
        before, result, text = text.partition(markers.start)
        if not result:
            return TextDelta(before)
    else:
        text = text.removeprefix(markers.start)
    reasoning, _, content = text.partition(markers.end)
    return TextDelta(before + content, reasoning)


def output_of(pieces: list[str], name: str, **options: object) -> tuple[OutputText, TextDelta]:
    output = OutputText(NumberedPieces(pieces), parser=reasoning_parser(name), **options)  # type: ignore[arg-type]
    deltas: list[TextDelta] = []
    for token in range(len(pieces)):
        deltas += output.push(token)
        if output.stopped_by is not None:
            break
    else:
        deltas += output.finish()
    content = "".join(delta.content for delta in deltas)
    return output, TextDelta(content, "".join(delta.reasoning for delta in deltas))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@given(pieces=PIECES, places=st.lists(st.integers(0, 100), max_size=8))
def test_reasoning_is_split_the_same_however_the_text_is_cut(
    name: str, pieces: list[str], places: list[int]
) -> None:
    text = "".join(pieces)
    assert output_of(cut(text, places), name)[1] == split(name, text)


def test_without_a_parser_all_text_is_content() -> None:
    output, text = output_of(["<think>", "a", "</think>", "b"], NO_PARSER)
    assert text == TextDelta("<think>a</think>b")
    assert (output.tokens, output.reasoning_tokens) == (4, 0)


def test_tokens_of_the_reasoning_are_counted() -> None:
    output, text = output_of(["<think>", "a", "b", "</think>", "c"], "qwen3")
    assert text == TextDelta("c", "ab")
    assert (output.tokens, output.reasoning_tokens) == (5, 3)  # with the marker that ends it


def test_a_stop_string_ends_the_reasoning_too() -> None:
    output, text = output_of(["<think>", "a<", "b!", "c"], "qwen3", stops=["!"])
    assert output.stopped_by == "!" and text == TextDelta("", "a<b")


def test_the_router_s_option_lists_every_parser() -> None:
    option = RouterConfig.__dataclass_fields__["reasoning_parser"]
    assert set(option.metadata["choices"]) == {NO_PARSER, AUTO, HARMONY, *PARSERS}
    assert option.default == NO_PARSER


def test_the_end_of_a_prompt_opens_or_closes_the_reasoning() -> None:
    assert opened_by("qwen3", "<|im_start|>assistant\n<think>\n") is True
    assert opened_by("qwen3", "<think>\n\n</think>\n\n") is False
    assert opened_by("qwen3", "<think>x</think> y") is None is opened_by(NO_PARSER, "<think>")
    opened, closed = (reasoning_parser("qwen3", opened=each) for each in (True, False))
    assert opened and closed
    assert opened.push("a</think>b") == (TextDelta("b", "a"),)
    assert closed.push("a") == (TextDelta("a"),)
    marked = reasoning_parser("mistral")
    assert marked and marked.push("[THINK]a[/THINK]b") == (TextDelta("b", "a"),)
