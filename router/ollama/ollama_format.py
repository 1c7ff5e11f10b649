"""``format``: answers that are JSON, or that follow a schema."""

from __future__ import annotations

from typing import Any

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..openai.structured_outputs import constraint


def read_format(given: Any) -> pb.StructuredOutputs | None:
    """The constraint of a request. Raises ``RequestError``."""
    if given in (None, ""):
        return None
    if given == "json":
        return constraint("json_object", True, "format")
    if isinstance(given, dict):
        return constraint("json", given, "format")
    raise invalid(f'invalid format: {given!r:.64}; expected "json" or a JSON schema', "format")
