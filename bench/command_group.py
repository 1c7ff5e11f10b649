"""The commands of `tandem bench`, whose modules are imported on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..commands.help_page import HelpfulGroup
from ..shared.errors import UsageError
from .grouped_command import GroupedCommand
from .interference_options import interference_groups
from .serving_options import serving_groups


@click.group("bench", cls=HelpfulGroup)
def bench() -> None:
    """Measure a server at a URL; options and results are vLLM's."""


def _serve(**values: Any) -> None:
    """Send requests to a server, and report latencies and throughput.

    Requests are sent at their planned times, even if earlier ones are still running. The table and
    the result file have vLLM's names.
    """
    from .serving import run_serving

    run_serving(values)


def _interference(**values: Any) -> None:
    """Measure the effect of a long prompt on other streams.

    Victims stream at their own speed, then one long prompt is sent. Works with any server that
    streams OpenAI's API; the long prompt must fit into the model's context.
    """
    from .interfering import run_interference

    run_interference(values)


def _plot(page: str, results: tuple[str, ...]) -> None:
    """Write PAGE.html with plots of one or two RESULT files.

    They must be results of `tandem bench serve --save-result --save-detailed`.
    """
    from .report.plot import write_plot
    from .report.result_file import read_detailed

    if len(results) > 2:
        raise UsageError(f"one or two results can be plotted, not {len(results)}")
    write_plot(Path(page), [read_detailed(Path(name)) for name in results])
    click.echo(f"{page} written")


bench.add_command(GroupedCommand("serve", serving_groups(), _serve))
bench.add_command(GroupedCommand("interference", interference_groups(), _interference))
bench.add_command(
    GroupedCommand(
        "plot",
        {},
        _plot,
        click.Argument(["page"], metavar="PAGE.html"),
        click.Argument(["results"], nargs=-1, required=True, metavar="RESULT..."),
    )
)
