"""One request to a decode node: reads its events, and translates its failures into our errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from ..proto import tandem_pb2 as pb
from ..shared.errors import NODE_DRAINING, OverloadedError, RequestError, UnavailableError
from ..shared.telemetry.logs import logger
from ..shared.telemetry.tracing import Metadata, branch, metadata
from .cluster.node import Node
from .cluster.node_table import NodeTable
from .errors import DeadlineError, DrainingError, NodeError
from .node_streams.events import NodeEvent, RequestFailedError
from .node_streams.remote_request import RemoteRequest

log = logger("router")

LATE = "The request did not finish within its deadline."

ERROR = pb.FINISH_REASON_ERROR
# The request did not reach the node, or one of them rejected the other's credentials.
_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
# The node works, and has rejected the request.
_REJECTED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class GenerationError(NodeError):
    """A node failed on one request; another node may succeed."""


@contextmanager
def node_request(
    nodes: NodeTable, node: Node, request: pb.GenerateRequest, patience: float
) -> Iterator[NodeRequest]:
    """Start ``request`` on a node; leaving the block cancels it there. ``patience`` is how many
    seconds to wait for the first event."""
    with branch("request_to_node", node=node.node_id) as span:
        attempt = NodeRequest(nodes, node, request, metadata(span), patience)
        attempt.start()
        try:
            yield attempt
        finally:
            attempt.end()


class NodeRequest:
    """One request on one node; see ``node_request``."""

    def __init__(
        self,
        nodes: NodeTable,
        node: Node,
        request: pb.GenerateRequest,
        metadata: Metadata,
        patience: float,
    ) -> None:
        self._nodes = nodes
        self._node = node
        self._request = request
        self._metadata = metadata
        self._patience = patience
        self._remote: RemoteRequest
        self._has_events = False
        self._error: GenerationError | None = None

    def start(self) -> None:
        self._remote = self._node.generate(self._request, self._metadata)

    def end(self) -> None:
        self._node.end(self._remote)

    async def read(self) -> Sequence[NodeEvent]:
        """The next events; empty at the end. Raises one of the router's own errors."""
        if self._error is not None:
            raise self._error
        try:
            events = await (self._remote.read() if self._has_events else self._first())
        except TimeoutError:
            self._nodes.back_off(self._node, self._remote, "no answer")
            message = f"A decode node did not answer within {self._patience:g} s."
            raise UnavailableError(message) from None
        except RequestFailedError as error:
            raise self._failure(error) from error
        for number, event in enumerate(events):
            if isinstance(event, pb.GenerateEvent) and _node_failed(event.finished):
                self._error = GenerationError(event.finished.error or "The generation failed.")
                return events[:number] or await self.read()
        return events

    async def _first(self) -> Sequence[NodeEvent]:
        start = time.monotonic()
        async with asyncio.timeout(self._patience):
            try:
                events = await self._remote.read()
            except RequestFailedError as error:
                if not await self._reconnects(error):
                    raise
                log.info("the connection to node %s had died: %s", self._node.node_id, error)
                self.end()
                self._request.deadline_seconds -= time.monotonic() - start
                self.start()
                events = await self._remote.read()
        self._node.ejection.on_reply(self._remote)
        self._has_events = True
        return events

    async def _reconnects(self, error: RequestFailedError) -> bool:
        """True if the request failed on a connection that may have been dead before, such as an
        idle one that a firewall has dropped, and a new connection is up. A node that has stopped
        refuses the new connection."""
        broken = error.code is grpc.StatusCode.UNAVAILABLE and not error.by_node
        if not broken or not self._remote.reuses or self._node.lost:
            return False
        return await self._node.reconnect(self._remote) and not self._node.lost

    def _failure(self, error: RequestFailedError) -> Exception:
        """Update the node's reachability after a failure, and translate the failure."""
        if self._node.lost and error.code is grpc.StatusCode.CANCELLED:  # by the node table
            return UnavailableError("The decode node that served this request is gone.")
        translated = _translate(error, self._node)
        if error.code in _UNREACHED and not isinstance(translated, DrainingError):
            self._nodes.back_off(self._node, self._remote, "unreachable")
        elif error.code in _REJECTED:
            self._node.ejection.on_reply(self._remote)
        return translated


def _node_failed(finished: pb.Finished) -> bool:
    """True if the choice ended with an error that another node might not have."""
    return finished.reason == ERROR and not finished.unfollowable


def _translate(error: RequestFailedError, node: Node) -> Exception:
    """A node's status as one of our errors. Its details, which contain addresses, are for the
    log alone."""
    details = error.details
    stopped = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    if stopped and (node.draining or details.startswith(NODE_DRAINING)):
        message = "The node that served this request was taken out of service; send it again."
        return DrainingError(message, code="node_draining")
    match error.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return request_error(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError("The server is overloaded; try again later.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(LATE)
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNAUTHENTICATED
        ):
            return UnavailableError("The decode node that served this request is unavailable.")
        case _:
            return GenerationError("The node that served this request failed.")


def request_error(details: str) -> RequestError:
    """A node's rejection of a request. ``details`` is the message, or JSON with message, param and
    code."""
    try:
        fields = json.loads(details)
        values = [fields.get(name) for name in ("message", "param", "code")]
    except (ValueError, AttributeError, RecursionError):
        values = [None] * 3
    message, param, code = (value if isinstance(value, str) else None for value in values)
    if message is None:
        return RequestError(details or "The node rejected the request.")
    return RequestError(message, param=param, code=code)
