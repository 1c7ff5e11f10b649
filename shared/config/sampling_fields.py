"""The sampling parameters that are plain numbers, in one table.

``SamplingParams`` of the engine and what its ranks get inherit from it. The fields of requests, the
message to a node, the options of routers and clients, and the fields of the page are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .fields import option

LARGEST_INT = 2**31 - 1
_NUMBER = "number"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """What a parameter may be. Requests and options have ``least`` to ``most``, without ``least``
    itself if ``above``. The engine takes ``computable`` values of any caller: those that ranks can
    compute with."""

    default: float
    least: float
    most: float
    above: bool
    computable: tuple[float, float]
    help: str

    @property
    def kind(self) -> type[float]:
        """``int``, or ``float``."""
        return type(self.default)


def number(
    default: float,
    least: float,
    most: float,
    help: str,
    *,
    above: bool = False,
    computable: tuple[float, float] | None = None,
) -> Any:
    """A row of the table; ``computable`` is the range of requests unless it is given."""
    kind = type(default)
    about = Number(
        default=default,
        least=least,
        most=most,
        above=above,
        computable=computable or (kind(least), kind(most)),
        help=help,
    )
    return field(default=default, metadata={_NUMBER: about})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The table. The defaults, OpenAI's, change nothing of what the model computes."""

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
        LARGEST_INT,
        "Draw from this many of the likeliest tokens; 0 and -1: from all.",
        computable=(0, 1 << 31),
    )
    min_p: float = number(
        0.0, 0, 1, "Leave out tokens less likely than this share of the likeliest."
    )
    repetition_penalty: float = number(
        1.0,
        0,
        100,
        "Above 1: repeat less of the prompt and the answer.",
        above=True,
        computable=(0.01, 100.0),
    )
    presence_penalty: float = number(0.0, -2, 2, "Above 0: prefer tokens that have not appeared.")
    frequency_penalty: float = number(
        0.0, -2, 2, "Above 0: the more often a token has appeared, the less likely."
    )


NUMBERS: dict[str, Number] = {item.name: item.metadata[_NUMBER] for item in fields(SamplingNumbers)}


def with_number_options(help: str) -> Callable[[type[T]], type[T]]:
    """Give a class of options, before it becomes a dataclass, one for each number, without a
    default. The ``help`` may have the parameter's ``{name}`` and ``{help}``."""

    def add(config: type[T]) -> type[T]:
        kinds: dict[str, Any] = {}
        for name, about in NUMBERS.items():
            kinds[name] = about.kind | None
            made = option(
                None,
                "--" + name.replace("_", "-"),
                help.format(name=name, help=about.help),
                minimum=about.kind(about.least),
                maximum=about.kind(about.most),
            )
            setattr(config, name, made)
        config.__annotations__ = kinds | config.__annotations__
        return config

    return add
