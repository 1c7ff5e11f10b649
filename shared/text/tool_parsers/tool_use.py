"""The tools of one request, as its output's parser needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How calls are found in the output. ``schemas`` has the JSON schema of each tool's parameters
    by its name; ``parallel`` is false if only the first call counts."""

    parser: str
    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool = True
    required: bool = False  # by tool_choice, so that the output is calls and nothing else
    named: str = ""  # the function that tool_choice names, whose arguments are the output
