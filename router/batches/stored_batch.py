"""Batches and their requests as rows of the database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
TIMES = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A row of the table. ``output_seconds`` is how long its results are kept."""

    number: int
    id: str
    owner: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str
    errors: str
    model: str | None
    output_file_id: str | None
    error_file_id: str | None
    output_seconds: int | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
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
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.ended else None,
            "error_file_id": self.error_file_id if self.ended else None,
            **{name: getattr(self, name) for name in TIMES},
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
    """A batch that a client asks for; ``seconds`` is its completion window."""

    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    seconds: int
    metadata: dict[str, str] | None
    output_seconds: int | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of an input file that has been checked."""

    line: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The line of a results file for one request, and the tokens that it used."""

    succeeded: bool
    data: bytes
    tokens: Sequence[int] = (0, 0, 0, 0)  # input, cached of it, output, reasoning of it
