"""The commands of `tandem bench`; each imports its work when it runs."""

from __future__ import annotations

from typing import Any

import click

from ..commands.help_page import HelpfulGroup
from .grouped_command import GroupedCommand
from .interference_options import interference_groups
from .serving_options import serving_groups


@click.group("bench", cls=HelpfulGroup)
def bench() -> None:
    """Measure a server at a URL, with vLLM's flags and results."""


def _serve(**values: Any) -> None:
    """Send requests to a server, and report latencies and throughput.

    Requests are sent at their planned times, whether or not earlier ones have been answered. Table
    and result file have vLLM's names.
    """
    from .serving import run_serving

    run_serving(values)


def _interference(**values: Any) -> None:
    """Measure how one long prompt disturbs the streams of others.

    Victims stream at their own speed, then one long prompt is sent. Works with any server of
    OpenAI's API that streams; the model's context must hold the long prompt.
    """
    from .interfering import run_interference

    run_interference(values)


def _plot(page: str, results: tuple[str, ...]) -> None:
    """Write PAGE.html with plots of one or two RESULT files.

    They are results of `tandem bench serve --save-result --save-detailed`, such as one of prefill
    apart and one of both together.
    """
    from .plotting import run_plot

    run_plot(page, results)


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
