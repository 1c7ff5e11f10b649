"""Errors of requests and their HTTP status; each API formats the error body in its own way."""

from __future__ import annotations

from ..shared.errors import UNFOLLOWABLE, OverloadedError, RequestError, UnavailableError
from ..shared.telemetry.logs import logger

log = logger("router")

INVALID = "invalid_request_error"
SERVER = "server_error"
PERMISSION = "permission_error"


class ApiError(Exception):
    """An error response. ``kind`` and ``code`` are OpenAI's type and code; ``request_id`` is set
    when the response is written."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers
        self.request_id: str | None = None


class NodeError(Exception):
    """A node failed, and the request cannot move elsewhere."""


class DrainingError(UnavailableError):
    """A planned shutdown of a part of the cluster ended the request. ``code`` names the part, so
    that clients can tell it from a crash and retry."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlineError(Exception):
    """The request did not finish within its deadline."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """The error of an invalid request: 400."""
    return RequestError(message, param=param, code=code)


def unfollowable(reason: str, param: str) -> RequestError:
    """The error of an output that cannot follow its grammar any further. ``param`` is the request
    parameter with the grammar; empty if the router has written the grammar."""
    message = f"Invalid '{param}': {reason}." if param else f"{reason[:1].upper()}{reason[1:]}."
    return RequestError(message, param=param or None, code=UNFOLLOWABLE)


def to_api_error(error: BaseException, *, retry_after: int) -> ApiError | None:
    """The response to one of our own errors; ``None`` for a bug, whose text clients must not
    see."""
    wait = ((b"retry-after", str(retry_after).encode()),)
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case OverloadedError():
            return ApiError(503, str(error), kind=SERVER, code="overloaded", headers=wait)
        case DrainingError():
            return ApiError(503, str(error), kind=SERVER, code=error.code, headers=wait)
        case UnavailableError():
            return ApiError(503, str(error), kind=SERVER, code="unavailable", headers=wait)
        case NodeError():
            return ApiError(500, str(error), kind=SERVER, code="node_failed")
        case DeadlineError():
            return ApiError(504, str(error), kind=SERVER, code="deadline_exceeded")
    return None


def failure_of(error: BaseException, what: str, *, retry_after: int) -> ApiError:
    """The response to any error of ``what``. The traceback of a bug goes into the log only."""
    api_error = to_api_error(error, retry_after=retry_after)
    if api_error is not None:
        return api_error
    log.error("%s failed", what, exc_info=error)
    return ApiError(500, "The server had an error while processing your request.", kind=SERVER)
