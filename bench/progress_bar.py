"""A bar on stderr while a benchmark runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Drawing takes time from the client.
DRAWN_PER_SECOND = 2


@contextmanager
def progress_bar(title: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Gives the function that advances the bar. Nothing is shown where stderr is no terminal."""
    if hidden or not sys.stderr.isatty():
        yield lambda: None
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
