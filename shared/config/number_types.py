"""Types of options that are numbers, with errors in plain words."""

from __future__ import annotations

import math
from typing import Any

import click

from .fields import range_in_words


class IntRange(click.IntRange):
    """An integer between two bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not an integer.", param, ctx)
        return int(_checked(self, number, param, ctx))


class NumberRange(click.FloatRange):
    """A number between two bounds, which NaN is not."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return _checked(self, number, param, ctx)


def _checked(
    kind: IntRange | NumberRange,
    number: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    low = -math.inf if kind.min is None else kind.min
    high = math.inf if kind.max is None else kind.max
    under = number <= low if kind.min_open else number < low
    over = number >= high if kind.max_open else number > high
    if under or over:
        words = range_in_words(kind.min, kind.max, above=kind.min_open, below=kind.max_open)
        kind.fail(f"{number} is out of range: it must be {words}.", param, ctx)
    return number
