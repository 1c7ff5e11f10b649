"""Progress of a benchmark on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

# Low, since drawing takes time from the client.
REFRESH_PER_SECOND = 2
SECONDS_PER_LINE = 10.0


@contextmanager
def progress_bar(title: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar during the block; yields the function that advances it."""
    if hidden or not sys.stderr.isatty():
        yield (lambda: None) if hidden else _Lines(title, total).advance
        return
    # Imported late: it takes longer than the start of a command without a bar.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=REFRESH_PER_SECOND,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


class _Lines:
    """Progress as lines of a log."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._printed_at = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._printed_at >= SECONDS_PER_LINE:
            self._printed_at = now
            click.echo(f"{self._title}: {self._done:,} of {self._total:,}", err=True)
