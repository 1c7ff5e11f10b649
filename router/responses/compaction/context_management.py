"""``context_management``: a conversation of more tokens than a threshold is compacted before the
model answers, in the same request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import invalid
from ...requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ...served_model import ServedModel

# The lowest threshold, as in OpenAI's API.
MIN_THRESHOLD = 1000
MAX_ENTRIES = 16
# Of the context, without a threshold.
DEFAULT_SHARE = 0.75


class CompactionEntry(BodyModel):
    """The compaction of conversations that have more than ``compact_threshold`` tokens."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=MIN_THRESHOLD, le=INT32 - 1), WHOLE] | None = None


CompactionEntries = Annotated[
    list[Any],
    Field(max_length=MAX_ENTRIES),
    DocumentedAs(Annotated[list[CompactionEntry], Field(min_length=1, max_length=MAX_ENTRIES)]),
]


def compaction_threshold(
    entries: list[Any] | None, model: ServedModel, ignored: set[str]
) -> int | None:
    """The lowest threshold that a request sets; ``None`` if it is not to be compacted. Raises
    ``RequestError``."""
    if entries is None:
        return None
    param = "context_management"
    if not entries:
        raise invalid(f"Invalid '{param}': empty array.", param, "empty_array")
    read = [
        CompactionEntry.read(entry, ignored, f"{param}[].", at=f"{param}[{i}]")
        for i, entry in enumerate(entries)
    ]
    given = [entry.compact_threshold for entry in read if entry.compact_threshold is not None]
    return min(given, default=int(DEFAULT_SHARE * model.max_model_len))
