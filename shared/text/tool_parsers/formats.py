"""The table of tool parsers, by the names that vLLM's ``--tool-call-parser`` has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .hermes import END as HERMES_END
from .hermes import START as HERMES_START
from .hermes import hermes
from .reader import Reader, Steps
from .tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which models write calls. ``kept`` are its markers: where they are special
    tokens, they must reach the parser as text."""

    parse: Callable[[Reader, ToolUse], Steps]
    kept: tuple[str, ...] = ()


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(hermes, (HERMES_START, HERMES_END)),
}
