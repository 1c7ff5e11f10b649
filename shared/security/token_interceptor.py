"""Rejection of control-plane RPCs without a token of the cluster."""

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

# Rejections are logged at most once in this time: a stranger must not fill the log.
QUIET_SECONDS = 10.0

NO_TOKEN, WRONG_TOKEN = "no token", "wrong token"

if TYPE_CHECKING:  # gRPC's classes are generic in its stubs only
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


def token_problem(credentials: Credentials, header: str | bytes) -> str:
    """The reason to reject an RPC with this header; empty if its token is the cluster's."""
    tokens = credentials.tokens
    if not tokens:
        return ""
    if not header:
        return NO_TOKEN
    value = header if isinstance(header, bytes) else header.encode()
    expected = [(TOKEN_PREFIX + token).encode() for token in tokens]
    # All are compared, so that the duration does not reveal which one is close.
    matches = sum(hmac.compare_digest(value, one) for one in expected)
    return "" if matches else WRONG_TOKEN


def request_token(context: grpc.aio.ServicerContext[Any, Any]) -> str | bytes:
    """The header of an RPC with its token; empty if there is none."""
    header: str | bytes = dict(context.invocation_metadata() or ()).get(TOKEN_HEADER, "")
    return header


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects RPCs without a token of ``credentials``, before their message is read. If
    ``credentials`` have no token, every RPC passes.

    ``refused`` counts rejected RPCs by reason; the owner of a metrics page registers it.
    """

    def __init__(self, credentials: Credentials, series: str) -> None:
        self._credentials = credentials
        self._logged_at = float("-inf")
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
            self._log(context.peer(), method, reason)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{reason}: every part of this cluster needs the same --cluster-token (tandem "
                f"serve makes one if it has none, which commands of its user on this machine find)",
            )

        # A handler for a request stream, so that no message is read.
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _log(self, peer: str, method: str, reason: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= QUIET_SECONDS:
            self._logged_at = now
            log.warning("refused %s from %s: %s; more are only counted", method, peer, reason)
