"""The tools of one request, as its output's parser needs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"[\w.:/@$-]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How calls are found in the output. ``schemas`` has the JSON schema of each tool's parameters,
    by name; ``parallel`` is false if only the first call counts. ``verbatim`` maps functions whose
    only argument is verbatim text, up to the end of the output, to the argument's name."""

    parser: str
    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool = True
    required: bool = False  # by tool_choice: the output consists of calls only
    verbatim: Mapping[str, str] = field(default_factory=dict)
    named: str = ""  # the function that tool_choice names, whose arguments are the output


def is_name(text: str) -> bool:
    """True if a tool may have this name."""
    return _NAME.fullmatch(text) is not None
