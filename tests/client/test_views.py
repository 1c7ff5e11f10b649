"""Formatting of a reply while it grows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.client.reply_stream import Piece
from tandem.client.reply_views import MarkdownView, complete_blocks

TEXT = "# Head\n\ntext\nmore\n\n- a\n\n- b\n\n```py\nx\n\ny\n```\n\nend"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one"),
        ("- a\n\n  part of a", ""),
        ("1. a\n\n2", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\n```\n\nb", "```\na\n\n```"),
        ("~~~\n```\n\nb\n~~~\n\nc", "~~~\n```\n\nb\n~~~"),
    ],
)
def test_blocks_are_complete_when_nothing_can_change_them(text: str, done: str) -> None:
    head, rest = complete_blocks(text)
    assert head == done and text == head + rest.rjust(len(text) - len(head), "\n")


def render(pieces: list[str]) -> str:
    console = Console(file=io.StringIO(), width=40, highlight=False)
    view = MarkdownView(console)
    for piece in pieces:
        view.add(Piece(piece))
    view.close()
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_a_reply_renders_the_same_however_it_is_split() -> None:
    whole = render([TEXT])
    assert "Head" in whole and " • b" in whole and whole.endswith("end")
    for size in (1, 2, 7):
        assert render([TEXT[i : i + size] for i in range(0, len(TEXT), size)]) == whole


def test_html_is_text() -> None:
    assert render(["<div>kept</div>\n\n<b>x</b>"]) == "<div>kept</div>\n\n<b>x</b>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\[ a_i + b_i \]", r"\[ a_i + b_i \]"),
        (r"\(x\)" + " and *slanted*", r"\(x\) and slanted"),
        (r"$$\begin{a} x_1 \\ x_2$$", r"$$\begin{a} x_1 \\ x_2$$"),
        ("$a_1$ and $b_1$", "$a_1$ and $b_1$"),
        ("*5 $ and 6 $*", "5 $ and 6 $"),
        (r"\$ 5 *and* \[ 6", "$ 5 and [ 6"),
    ],
)
def test_formulas_are_shown_as_their_source(text: str, expected: str) -> None:
    assert render([text]) == expected
