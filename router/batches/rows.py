"""Rows of the database: batches and their requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class BatchStatus(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


UNFINISHED = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class BatchColumns(BaseModel):
    """The columns that are fields of OpenAI's batch object."""

    id: str
    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None


class StoredBatch(BatchColumns):
    """A row of the table of batches. ``output_seconds`` is the lifetime of its results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    owner: str
    metadata: str
    errors: str
    output_seconds: int | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int

    @property
    def ended(self) -> bool:
        return self.status not in UNFINISHED

    def body(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        errors = json.loads(self.errors)
        fields = self.model_dump(include=set(BatchColumns.model_fields))
        if not self.ended:
            fields |= {"output_file_id": None, "error_file_id": None}
        return fields | {
            "object": "batch",
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": json.loads(self.metadata),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch that a client requests; ``seconds`` is its completion window."""

    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    seconds: int
    metadata: dict[str, str] | None
    output_seconds: int | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One validated line of an input file."""

    line: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request's line of a results file, in pieces, and the tokens that the request used."""

    succeeded: bool
    pieces: Sequence[bytes]
    tokens: Sequence[int] = (0, 0, 0, 0)  # input, cached input, output, reasoning

    @property
    def size(self) -> int:
        """Bytes of the line."""
        return sum(map(len, self.pieces))
