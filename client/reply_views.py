"""An answer on the terminal while it is streamed: formatted, or as it is."""

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
from .printable import printable
from .reply_stream import Piece

# Formatting is repeated this often while a block grows.
REFRESH_SECONDS = 0.1
FENCES = ("```", "~~~")
LIST_OR_INDENTED = re.compile(r"[-*+\d\s]")


class PlainView:
    """The text as it comes. Reasoning is dimmed, or left out if the output is not a terminal."""

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
        """End a line that has begun."""
        if self._line_open:
            self.write("\n", "")

    def close(self) -> None:
        self.break_line()


class MarkdownView:
    """The text as Markdown. Blocks that are complete stay; the last one is formatted again as it
    grows, so that an answer of any length costs the same."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._asides = PlainView(console)
        self._block = ""
        self._live: Live | None = None
        self._shown = 0.0
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
        if time.monotonic() - self._shown >= REFRESH_SECONDS:
            self._show()

    def close(self) -> None:
        self._asides.break_line()
        self._finish_block()

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_Lines(as_markdown(self._block), last=True), refresh=True)
        self._shown = time.monotonic()

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
    """The lines of a block without the spaces to their right, which would be copied with them; only
    the ``last`` ones that fit, if it grows: what has scrolled away cannot be formatted again."""

    def __init__(self, content: Markdown, *, last: bool = False) -> None:
        self._content = content
        self._last = last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _without_blank_ends(
            [_trimmed(line) for line in console.render_lines(self._content, options, pad=False)]
        )
        for line in lines[-max(1, options.max_height - 2) :] if self._last else lines:
            yield from line
            yield Segment.line()


def _without_blank_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    """Lines without the empty ones at both ends; one is shown between two blocks anyway."""
    filled = [number for number, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _trimmed(line: list[Segment]) -> list[Segment]:
    """A line without blanks at its end, except on a background."""
    kept = list(line)
    while kept and not kept[-1].text.strip() and not (kept[-1].style and kept[-1].style.bgcolor):
        kept.pop()
    if kept and not (kept[-1].style and kept[-1].style.bgcolor):
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


def as_markdown(text: str) -> Markdown:
    """Markdown in which HTML is text, since rich would drop it, and links show their address."""
    made = Markdown(text, hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    made.parsed = keep_formulas(parser).parse(text)
    return made


def complete_blocks(text: str) -> tuple[str, str]:
    """The part that what follows cannot change, and the rest: it ends at an empty line outside of
    code, before a line that is not indented and may be no item of a list."""
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
