"""The context of a gRPC call, for services that are called without a server."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, cast

import grpc


class AbortedError(Exception):
    """The error that a context raises when a call is refused."""


class FakeContext:
    """A call's context. Only the statuses in ``may_abort`` are allowed, and with details."""

    def __init__(self, may_abort: Set[grpc.StatusCode] = frozenset()) -> None:
        self._may_abort = may_abort

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code in self._may_abort and details
        raise AbortedError(details)


def fake_context(*may_abort: grpc.StatusCode) -> grpc.aio.ServicerContext[Any, Any]:
    """A ``FakeContext``, typed as what services take."""
    return cast("grpc.aio.ServicerContext[Any, Any]", FakeContext(frozenset(may_abort)))
