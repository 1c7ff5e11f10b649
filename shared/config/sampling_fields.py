"""The table of numeric sampling parameters.

The parameters of the engine and of its ranks inherit from it. The fields of requests, the message
to a node, the options of routers and clients, and the fields of the page are generated from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .fields import option

MAX_INT = 2**31 - 1
_NUMBER = "number"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """The range of a parameter. Requests and options may set ``minimum`` to ``maximum``, without
    ``minimum`` itself if ``above``. The engine accepts any ``computable`` value: those with which
    ranks can compute."""

    default: float
    minimum: float
    maximum: float
    above: bool
    computable: tuple[float, float]
    help: str

    @property
    def kind(self) -> type[float]:
        """``int``, or ``float``."""
        return type(self.default)


def number(
    default: float,
    minimum: float,
    maximum: float,
    help: str,
    *,
    above: bool = False,
    computable: tuple[float, float] | None = None,
) -> Any:
    """A row of the table; by default, ``computable`` is the range of requests."""
    kind = type(default)
    row = Number(
        default=default,
        minimum=minimum,
        maximum=maximum,
        above=above,
        computable=computable or (kind(minimum), kind(maximum)),
        help=help,
    )
    return field(default=default, metadata={_NUMBER: row})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The table. The defaults are OpenAI's, which leave the model's distribution as it is."""

    temperature: float = number(
        1.0,
        0,
        2,
        "Higher is more varied; 0 always takes the likeliest token.",
        computable=(0.0, 100.0),
    )
    top_p: float = number(
        1.0,
        0,
        1,
        "Draw from the likeliest tokens that together have this probability.",
        above=True,
    )
    top_k: int = number(
        0,
        -1,
        MAX_INT,
        "Draw from this many of the likeliest tokens; 0 or -1: all tokens.",
        computable=(0, 1 << 31),
    )
    min_p: float = number(
        0.0, 0, 1, "Leave out tokens less likely than this share of the likeliest."
    )
    repetition_penalty: float = number(
        1.0,
        0,
        100,
        "Above 1: repeat less of the prompt and the output.",
        above=True,
        computable=(0.01, 100.0),
    )
    presence_penalty: float = number(0.0, -2, 2, "Above 0: prefer tokens that have not appeared.")
    frequency_penalty: float = number(
        0.0, -2, 2, "Above 0: a token is less likely the more often it has appeared."
    )


NUMBERS: dict[str, Number] = {item.name: item.metadata[_NUMBER] for item in fields(SamplingNumbers)}


def with_number_options(help: str) -> Callable[[type[T]], type[T]]:
    """Add an option without a default for each number to a class, before it becomes a dataclass.
    ``help`` may contain ``{name}`` and ``{help}`` of the parameter."""

    def add(config: type[T]) -> type[T]:
        kinds: dict[str, Any] = {}
        for name, row in NUMBERS.items():
            kinds[name] = row.kind | None
            flag = option(
                None,
                "--" + name.replace("_", "-"),
                help.format(name=name, help=row.help),
                minimum=row.kind(row.minimum),
                maximum=row.kind(row.maximum),
            )
            setattr(config, name, flag)
        config.__annotations__ = kinds | config.__annotations__
        return config

    return add
