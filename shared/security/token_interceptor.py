"""Rejects RPCs of the control plane that do not carry a token of the cluster."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from prometheus_client import Counter

from .credentials import TOKEN_HEADER, TOKEN_PREFIX, Credentials

log = logging.getLogger("tandem.security")

# Repeated RPCs by a stranger must not fill the log.
QUIET_SECONDS = 10.0

NO_TOKEN, WRONG_TOKEN = "no token", "wrong token"

if TYPE_CHECKING:  # gRPC's classes are generic in its stubs only
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


def token_problem(credentials: Credentials, shown: str | bytes) -> str:
    """The reason to reject a caller that has shown this header; empty for one of the cluster."""
    tokens = credentials.tokens
    if not tokens:
        return ""
    if not shown:
        return NO_TOKEN
    given = shown if isinstance(shown, bytes) else shown.encode()
    expected = [(TOKEN_PREFIX + token).encode() for token in tokens]
    # All are compared, so that the time taken does not tell which one is close.
    known = sum(hmac.compare_digest(given, one) for one in expected)
    return "" if known else WRONG_TOKEN


def shown_token(context: grpc.aio.ServicerContext[Any, Any]) -> str | bytes:
    """The header with the token that the caller of an RPC has shown."""
    shown: str | bytes = dict(context.invocation_metadata() or ()).get(TOKEN_HEADER, "")
    return shown


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects RPCs without a token of ``credentials``, before their message is read. If there is
    no token, every RPC passes.

    ``refused`` counts rejected RPCs by reason; the owner of a metrics page registers it.
    """

    def __init__(self, credentials: Credentials, series: str) -> None:
        self._credentials = credentials
        self._told = float("-inf")
        self.refused = Counter(
            series, "RPCs without the cluster's token, by reason.", ["reason"], registry=None
        )
        for reason in (NO_TOKEN, WRONG_TOKEN):
            self.refused.labels(reason)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        metadata = dict(handler_call_details.invocation_metadata or ())
        reason = token_problem(self._credentials, metadata.get(TOKEN_HEADER, ""))
        if not reason:
            return await continuation(handler_call_details)
        self.refused.labels(reason).inc()
        method = handler_call_details.method

        async def refuse(messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._tell(context.peer(), method, reason)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{reason}: every part of this cluster needs the same --cluster-token (tandem "
                f"serve makes one if it has none, which commands of its user on this machine find)",
            )

        # A handler of a request stream, so that no message is read.
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _tell(self, peer: str, method: str, reason: str) -> None:
        now = time.monotonic()
        if now - self._told >= QUIET_SECONDS:
            self._told = now
            log.warning("refused %s from %s: %s; more are only counted", method, peer, reason)
