"""``keep_alive``: how long a model stays loaded."""

from __future__ import annotations

import re
from typing import Any

from ..errors import invalid

# A duration of Go, such as 5m or 1h30m.
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")


def check_keep_alive(given: Any) -> None:
    """The model stays loaded as long as its operator wants, so any time is honoured; unloading it
    is not. Raises ``RequestError``."""
    if given is None:
        return
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number and not (isinstance(given, str) and _DURATION.fullmatch(given[:64])):
        message = f"invalid keep_alive: {given!r:.64}; expected seconds or a duration such as '5m'"
        raise invalid(message, "keep_alive")
    digits = str(given) if number else re.sub(r"[^\d]", "", given)
    if float(digits) == 0:
        message = "'keep_alive': 0 is not supported: clients of this server cannot unload its model"
        raise invalid(message, "keep_alive", "unsupported_value")
