"""A bar on stderr while a benchmark runs; where that is no terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

# Drawing takes time from the client.
DRAWN_PER_SECOND = 2
SECONDS_PER_LINE = 10.0


@contextmanager
def progress_bar(title: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Gives the function that advances the bar."""
    if hidden or not sys.stderr.isatty():
        yield (lambda: None) if hidden else _Lines(title, total).advance
        return
    # On demand: it takes longer to import than a command without a bar takes to start.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=DRAWN_PER_SECOND,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


class _Lines:
    """Progress for a log."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._told = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._told >= SECONDS_PER_LINE:
            self._told = now
            click.echo(f"{self._title}: {self._done:,} of {self._total:,}", err=True)
