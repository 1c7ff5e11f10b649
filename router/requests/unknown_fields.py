"""Fields of requests that no API has."""

from __future__ import annotations

from collections.abc import Set

from ...shared.telemetry.logs import logger
from ..errors import invalid

log = logger("router")

# Names that are logged, once each; clients may invent any number of them.
MAX_NAMED_FIELDS = 64


class UnknownFields:
    """Logs each once, since it may be misspelt; ``strict`` routers reject them."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._named: set[str] = set()

    def note(self, names: Set[str]) -> None:
        """Note the unknown fields of one request. Raises ``RequestError``."""
        if names and self._strict:
            name = min(names)
            message = f"Unknown parameter: '{name}'; this server rejects what no API has."
            raise invalid(message, name, "unknown_parameter")
        for name in sorted(names - self._named):
            if len(self._named) < MAX_NAMED_FIELDS:
                self._named.add(name)
                log.warning("requests have the field %r, which is unknown and ignored", name)
