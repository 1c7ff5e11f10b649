"""Commands with groups of options in their help, and options with several values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from ..commands.help_page import option_groups, write_group
from ..commands.part_command import PartCommand
from ..shared.config.command_line import IntRange, NumberRange

Groups = Mapping[str, Sequence[click.Parameter]]


class GroupedCommand(PartCommand):
    """A command with its own groups of options."""

    def __init__(
        self, name: str, groups: Groups, callback: Callable[..., Any], *arguments: click.Parameter
    ) -> None:
        params = [*arguments, *(option for group in groups.values() for option in group)]
        super().__init__(name, params=params, callback=callback, help=callback.__doc__)
        self._order = list(groups)
        for title, options in groups.items():
            for option in options:
                if not hasattr(option, "group"):
                    option.group = (title, "")  # type: ignore[attr-defined]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and parameter.multiple
            for name in parameter.opts
        }
        return super().parse_args(ctx, repeat_flags(args, several))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        order = self._order
        groups = sorted(
            option_groups(self.params),
            key=lambda group: order.index(group.name) if group.name in order else len(order),
        )
        for group in groups:
            write_group(formatter, group)


def repeat_flags(args: Sequence[str], several: set[str]) -> list[str]:
    """``--header A=1 B=2`` as ``--header A=1 --header B=2``, for the flags of ``several``."""
    result: list[str] = []
    flag, values = "", 0
    for arg in args:
        if arg.startswith("-"):
            flag, values = (arg if arg in several else ""), 0
        elif flag:
            values += 1
            if values > 1:
                result.append(flag)
        result.append(arg)
    return result


class _Number(click.Option):
    """An option whose range is only in its error message, so that help stays short."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


def whole(*names: str, default: int | None, low: int, help: str) -> click.Option:
    """An option with an integer value."""
    kind = IntRange(min=low)
    return _Number(names, type=kind, default=default, help=help, show_default=True, metavar="N")


def number(
    *names: str,
    default: float | None,
    help: str,
    low: float | None = None,
    high: float | None = None,
    positive: bool = False,
    below_high: bool = False,
) -> click.Option:
    """An option with a number as its value, which may be infinity."""
    kind = NumberRange(low, high, min_open=positive, max_open=below_high)
    return _Number(
        names,
        type=kind,
        default=default,
        help=help,
        show_default=True,
        metavar="X",
    )


def text(*names: str, default: str | None = None, metavar: str, help: str) -> click.Option:
    """An option with a string value."""
    return click.Option(names, default=default, metavar=metavar, help=help, show_default=True)


def choice(*names: str, of: Sequence[str], default: str | None, help: str) -> click.Option:
    """An option with one of a few values."""
    return click.Option(names, type=click.Choice(of), default=default, help=help, show_default=True)


def several(*names: str, metavar: str, help: str) -> click.Option:
    """An option with all words up to the next option as its values, as in vLLM."""
    return click.Option(names, multiple=True, metavar=metavar, help=help)


def flag(*names: str, help: str) -> click.Option:
    """An option without a value."""
    return click.Option(names, is_flag=True, help=help)
