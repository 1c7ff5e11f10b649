"""Display of a streamed reply on the terminal, formatted or plain."""

from __future__ import annotations

import re
import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from .maths_source import keep_formulas
from .reply_stream import Piece
from .text import printable

# Interval of formatting while a block grows.
REFRESH_SECONDS = 0.1
FENCES = ("```", "~~~")
LIST_OR_INDENTED = re.compile(r"[-*+\d\s]")


class PlainView:
    """Plain text. Reasoning is dimmed, or omitted if the output is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._aside = False
        self._line_open = False

    def add(self, piece: Piece) -> None:
        if piece.aside and not self._console.is_terminal:
            return
        if self._aside and not piece.aside:
            self.break_line()
        self._aside = piece.aside
        self.write(printable(piece.text), "dim" if piece.aside else "")

    def write(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._line_open = not text.endswith("\n")
        self._console.file.flush()

    def break_line(self) -> None:
        """End an incomplete line."""
        if self._line_open:
            self.write("\n", "")

    def close(self) -> None:
        self.break_line()


class MarkdownView:
    """Text formatted as Markdown. Only the last block is formatted again as it grows, so that the
    cost does not depend on the length of the reply."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._asides = PlainView(console)
        self._block = ""
        self._live: Live | None = None
        self._refreshed_at = 0.0
        self._first = True

    def add(self, piece: Piece) -> None:
        if piece.aside:
            self._finish_block()
            self._asides.add(piece)
            self._first = False
            return
        self._asides.break_line()
        done, self._block = complete_blocks(self._block + printable(piece.text))
        if done:
            self._print(done)
        if time.monotonic() - self._refreshed_at >= REFRESH_SECONDS:
            self._show()

    def close(self) -> None:
        self._asides.break_line()
        self._finish_block()

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_Lines(as_markdown(self._block), last=True), refresh=True)
        self._refreshed_at = time.monotonic()

    def _finish_block(self) -> None:
        if self._block.strip():
            self._print(self._block)
        self._block = ""
        self._stop()

    def _print(self, block: str) -> None:
        self._stop()
        if not self._first:
            self._console.print()
        self._console.print(_Lines(as_markdown(block)), end="")
        self._first = False

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Lines:
    """The lines of a block without trailing spaces, which users would copy with the text. If
    ``last``, only the last lines that fit: those that have scrolled away cannot be redrawn."""

    def __init__(self, content: Markdown, *, last: bool = False) -> None:
        self._content = content
        self._last = last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _without_blank_ends(
            [_trim(line) for line in console.render_lines(self._content, options, pad=False)]
        )
        for line in lines[-max(1, options.max_height - 2) :] if self._last else lines:
            yield from line
            yield Segment.line()


def _without_blank_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    """Lines without the empty ones at both ends: an empty line separates blocks anyway."""
    filled = [number for number, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _trim(line: list[Segment]) -> list[Segment]:
    """A line without trailing spaces, except those with a background colour."""
    rest = list(line)
    while rest and not rest[-1].text.strip() and not (rest[-1].style and rest[-1].style.bgcolor):
        rest.pop()
    if rest and not (rest[-1].style and rest[-1].style.bgcolor):
        rest[-1] = Segment(rest[-1].text.rstrip(), rest[-1].style)
    return rest


def as_markdown(text: str) -> Markdown:
    """Markdown that shows the addresses of links, and HTML as text, which rich would drop."""
    markdown = Markdown(text, hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    markdown.parsed = keep_formulas(parser).parse(text)
    return markdown


def complete_blocks(text: str) -> tuple[str, str]:
    """Split a text into the part that later text cannot change, and the rest. The first ends at an
    empty line outside code, before a line that is not indented and cannot be an item of a list."""
    cut, at, fence, blank = 0, 0, "", False
    for line in text.splitlines(keepends=True):
        start = line.lstrip()[:3]
        if blank and not fence and not LIST_OR_INDENTED.match(line):
            cut = at
        if start in FENCES and fence in ("", start):
            fence = "" if fence else start
        blank = not line.strip()
        at += len(line)
    return text[:cut].rstrip("\n"), text[cut:]
