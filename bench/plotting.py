"""`tandem bench plot`: a page of result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ..shared.errors import UsageError
from .report.plot import write_plot
from .report.result_file import read_detailed


def run_plot(page: str, results: Sequence[str]) -> None:
    """The whole command. Raises ``UsageError``."""
    if len(results) > 2:
        raise UsageError(f"one or two results can be plotted, not {len(results)}")
    write_plot(Path(page), [read_detailed(Path(name)) for name in results])
    click.echo(f"{page} written")
