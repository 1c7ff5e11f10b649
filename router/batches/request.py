"""Parse POST /v1/batches."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field

from ..errors import invalid
from ..requests.body_model import WHOLE, BodyModel, DocumentedAs
from .rows import NewBatch
from .store import DAY
from .upload import MAX_LIFETIME, MIN_LIFETIME

MAX_WINDOW = 30 * DAY
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY}


class ResultsExpireAfter(BodyModel):
    """How long the results of a batch are kept."""

    anchor: str
    seconds: Annotated[int, Field(ge=MIN_LIFETIME, le=MAX_LIFETIME), WHOLE]


class CreateBatchRequest(BodyModel):
    """The body of POST /v1/batches. The completion window may be any number of seconds, minutes,
    hours or days up to 30 days, such as 24h."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: Annotated[str, Field(max_length=128)]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Annotated[
        dict[str, Any], Field(max_length=MAX_METADATA), DocumentedAs(dict[str, str])
    ] = Field(default_factory=dict)
    output_expires_after: (
        Annotated[dict[str, Any], DocumentedAs(ResultsExpireAfter | None)] | None
    ) = None


def parse_batch(body: Any, owner: str, endpoints: Collection[str]) -> NewBatch:
    """Check a body. Raises ``RequestError``."""
    request = CreateBatchRequest.read(body, set())
    if request.endpoint not in endpoints:
        supported = ", ".join(f"'{endpoint}'" for endpoint in endpoints)
        message = f"Invalid value for 'endpoint': '{request.endpoint}'; supported are {supported}."
        raise invalid(message, "endpoint", "invalid_value")
    return NewBatch(
        owner=owner,
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        seconds=_window(request.completion_window),
        metadata=_metadata(request.metadata) or None,
        output_seconds=_output_seconds(request.output_expires_after),
    )


def _window(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        message = (
            f"Invalid value for 'completion_window': '{window}'; use '24h', or another time up to "
            "'30d'."
        )
        raise invalid(message, "completion_window", "invalid_value")
    return seconds


def _metadata(metadata: dict[str, Any]) -> dict[str, str]:
    for name, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            message = f"Each value of 'metadata' must be a string of at most {MAX_METADATA_VALUE}"
            raise invalid(f"{message} characters.", "metadata")
        if len(name) > MAX_METADATA_NAME:
            message = f"Each name in 'metadata' may have at most {MAX_METADATA_NAME} characters."
            raise invalid(message, "metadata")
    return metadata


def _output_seconds(expires_after: dict[str, Any] | None) -> int | None:
    if expires_after is None:
        return None
    expiry = ResultsExpireAfter.read(expires_after, set())
    if expiry.anchor != "created_at":
        raise invalid("'anchor' must be 'created_at'.", "output_expires_after")
    return expiry.seconds
