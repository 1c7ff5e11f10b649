"""What clients are told when something goes wrong: OpenAI's error body and status codes."""

from __future__ import annotations

from typing import Any

from ..shared.errors import OverloadedError, RequestError, UnavailableError

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An answer with an error status."""

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

    def body(self) -> dict[str, Any]:
        """The JSON that OpenAI's clients expect."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class NodeError(Exception):
    """A node failed, and the request cannot move elsewhere."""


class DrainingError(UnavailableError):
    """A part of the cluster ended as planned before the request did. ``code`` says which: a client
    can tell it from a crash, and send the request again."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlineError(Exception):
    """The request has taken all the time that it may."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """The request is wrong: 400."""
    return RequestError(message, param=param, code=code)


def to_api_error(error: BaseException, *, retry_after: int) -> ApiError | None:
    """How an error of ours is told to a client; ``None`` for a bug, which is told as nothing."""
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


def internal_error() -> ApiError:
    """For bugs: the log has the trace, the client does not."""
    return ApiError(500, "The server had an error while processing your request.", kind=SERVER)
