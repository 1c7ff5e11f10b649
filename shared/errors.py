"""Tandem's own exceptions.

::

    TandemError
    ├── UsageError             invalid command line or config file               exit code 2
    ├── StartupError           a process cannot start                            exit code 1
    │   └── ModelError         the model folder is missing, broken, unsupported
    │       └── UnsupportedWeightsError   the same model may have weights in another form
    ├── RequestError           the request is invalid                            HTTP 400
    ├── OverloadedError        no room now; retry later                          HTTP 503
    ├── UnavailableError       no node can serve it                              HTTP 503
    ├── BenchmarkError         a benchmark has nothing to measure                exit code 1
    └── TransferError          one attempt at a transfer failed
        └── PeerRefusedError   the two sides must never transfer (other model)

Messages name the problem, the value, the limit and the remedy.
"""

from __future__ import annotations

from .causes import Cause

# Prefix of the status details with which a draining node rejects or ends a request.
NODE_DRAINING = "this node is draining"
# Error code of an output that can no longer follow its grammar.
UNFOLLOWABLE = "grammar_unfollowable"

# Characters of a value in a message.
_MAX_LENGTH = 200


def brief(value: object) -> str:
    """The repr of a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."


def in_line(value: object) -> str:
    """A value for a message, without quotes if it is short and printable."""
    text = str(value)
    return text if text.isprintable() and len(text) <= _MAX_LENGTH else brief(text)


class TandemError(Exception):
    """Base of Tandem's own errors."""


class UsageError(TandemError):
    """An invalid command line, environment variable or config file."""


class StartupError(TandemError):
    """A process cannot start: a port is taken, memory is short, a peer cannot be reached."""


class ModelError(StartupError):
    """The model folder is missing or broken, or the model is not supported."""


class UnsupportedWeightsError(ModelError):
    """The weights have an unsupported form; the same model may be available in another one.

    The message is ``problem`` and then ``remedy``.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem

    def __str__(self) -> str:
        return "; ".join(self.args)


class RequestError(TandemError):
    """The request is invalid; the same request will never succeed.

    ``param`` names the field, as in OpenAI's error body; ``code`` is a short machine-readable word
    such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(TandemError):
    """A bounded queue is full; the same request may succeed later."""


class UnavailableError(TandemError):
    """No node can serve the request at present."""


class BenchmarkError(TandemError):
    """A benchmark has nothing to measure: the server is unreachable, or rejects the requests."""


class TransferError(TandemError):
    """One attempt at a transfer failed; another node, or local prefill, may still succeed.

    ``cause`` labels metrics; subclasses have defaults. ``computing`` is true if the peer was
    computing the prompt.
    """

    cause = Cause.OTHER

    def __init__(
        self, message: str = "", *, cause: Cause | None = None, computing: bool = False
    ) -> None:
        super().__init__(message)
        if cause is not None:
            self.cause = cause
        self.computing = computing


class PeerRefusedError(TransferError):
    """The peer runs another model or protocol; no attempt with it can ever succeed."""

    cause = Cause.REFUSED
