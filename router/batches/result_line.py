"""The lines of results files."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..http.encoding import dump
from .rows import BatchRequest, RequestResult

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
CANCELLED = ("batch_cancelled", "This request was not executed, because its batch was cancelled.")
FULL = ("storage_full", "This server has no room for the response; see its --max-stored-bytes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundResponse:
    """The response to a request without a connection; ``tokens`` as in ``RequestResult``.
    ``transient``: a failure that is not the request's fault."""

    status: int
    request_id: str
    body: bytes
    tokens: Sequence[int] = (0, 0, 0, 0)
    transient: bool = False


def response_result(request: BatchRequest, response: BackgroundResponse) -> RequestResult:
    """The result of a request with a response, which may be an error."""
    head = dump({"status_code": response.status, "request_id": response.request_id})[:-1]
    succeeded = response.status == 200
    return RequestResult(
        succeeded=succeeded,
        pieces=_line(request, (head, b',"body":', response.body, b"}"), b"null"),
        tokens=response.tokens if succeeded else (0, 0, 0, 0),
    )


def error_result(request: BatchRequest, reason: tuple[str, str]) -> RequestResult:
    """The result of a request that was not served, or whose response is lost."""
    code, message = reason
    error: dict[str, Any] = {"code": code, "message": message}
    return RequestResult(succeeded=False, pieces=_line(request, (b"null",), dump(error)))


def _line(request: BatchRequest, response: Sequence[bytes], error: bytes) -> Sequence[bytes]:
    head = dump({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": request.custom_id})[:-1]
    return (head, b',"response":', *response, b',"error":', error, b"}\n")
