"""One prompt's events from whichever decode node serves it.

Until a node has sent output, the request can still move: a node that refuses for lack of room, that
cannot be reached or that dies is excluded, and the next one is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..shared.errors import OverloadedError, RequestError, TandemError, UnavailableError
from ..shared.telemetry import logger
from .errors import NodeError
from .nodes import Node, NodeTable
from .options import RouterOptions
from .placement import place

log = logger("router")

# What ``read`` gives at the end of a stream; the stubs for grpc do not know it.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

MAX_ATTEMPTS = 4
# Added to the request's own deadline, so that the node's own answer about it arrives.
DEADLINE_MARGIN = 5.0


async def dispatch(
    request: pb.GenerateRequest, nodes: NodeTable, options: RouterOptions
) -> AsyncGenerator[tuple[Node, pb.GenerateEvent], None]:
    """The node's events, with the node; ``Admitted`` comes first, and once."""
    failed: frozenset[tuple[str, int]] = frozenset()
    admitted = False
    refusal: TandemError | None = None
    while len(failed) < MAX_ATTEMPTS:
        node = _place(request, nodes, failed)
        if node is None:
            break
        output = False
        try:
            async with aclosing(_events(node, request, options)) as events:
                async for event in events:
                    kind = event.WhichOneof("event")
                    if kind == "admitted" and admitted:
                        continue
                    admitted = admitted or kind == "admitted"
                    output = output or kind in ("tokens", "finished", "prompt_logprobs")
                    yield node, event
            return
        except (OverloadedError, UnavailableError) as error:
            if output:
                raise NodeError("The node that served this request failed.") from error
            log.warning("node %s failed request %s: %s", node.node_id, request.request_id, error)
            # "No room" says more to a client than what a later node's failure does.
            refusal = refusal if isinstance(refusal, OverloadedError) else error
            failed |= {node.key}
    raise refusal or UnavailableError("No decode node is available; try again soon.")


def _place(
    request: pb.GenerateRequest, nodes: NodeTable, failed: frozenset[tuple[str, int]]
) -> Node | None:
    """Choose the nodes, and write the prefill candidates into the request."""
    views = nodes.views()
    placement = place(views, request.prompt, salt=request.cache_salt, exclude=failed)
    if placement is None:
        return None
    del request.prefill[:]
    request.prefill.extend(
        pb.PrefillCandidate(
            node_id=view.node_id,
            epoch=view.epoch,
            address=view.address,
            queued_prefill_tokens=view.queued_prefill_tokens,
            prefill_tokens_per_second=view.prefill_tokens_per_second,
        )
        for view in placement.prefill
    )
    return nodes.get(placement.decode.node_id, placement.decode.epoch)


async def _events(
    node: Node, request: pb.GenerateRequest, options: RouterOptions
) -> AsyncGenerator[pb.GenerateEvent, None]:
    """One call. Leaving it in any way cancels it on the node."""
    call = node.generate(request, options.request_timeout + DEADLINE_MARGIN)
    try:
        async with asyncio.timeout(options.admission_timeout):
            event = await call.read()
        while event is not EOF:
            yield event
            event = await call.read()
    except TimeoutError:
        raise UnavailableError(
            f"A decode node did not answer within {options.admission_timeout:g} s."
        ) from None
    except grpc.aio.AioRpcError as error:
        raise _translated(error) from error
    except asyncio.CancelledError:
        # The table cancels the calls of a lost node; any other cancellation is our own task's.
        if node.lost and not _cancelling():
            raise UnavailableError("The decode node that served this request is gone.") from None
        raise
    finally:
        node.done(call)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _translated(error: grpc.aio.AioRpcError) -> Exception:
    """The node's status as one of ours. Details stay in the log: they hold addresses."""
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _request_error(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError("The server is overloaded; try again later.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return NodeError("The request did not finish within its deadline.")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            log.info("a decode node is unavailable: %s", details)
            return UnavailableError("The decode node that served this request is unavailable.")
        case code:
            log.error("a decode node failed with %s: %s", code.name, details)
            return NodeError("The node that served this request failed.")


def _request_error(details: str) -> RequestError:
    """The details are the message, or JSON with message, param and code."""
    try:
        fields = json.loads(details)
        return RequestError(
            str(fields["message"]), param=fields.get("param"), code=fields.get("code")
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestError(details or "The node refused the request.")
