"""One prompt's events from whichever decode node serves it.

A request moves on as long as its client has seen nothing of it: a node that refuses for lack of
room, that cannot be reached or that dies is excluded, and the next one is asked. A stream has been
seen with its first output, a unary answer only when it is whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..shared.errors import NODE_DRAINING, OverloadedError, RequestError, UnavailableError
from ..shared.telemetry.logs import logger
from ..shared.telemetry.tracing import branch, metadata, step
from .cluster.inflight import Booking
from .cluster.nodes import Node, NodeTable
from .errors import DeadlineError, DrainingError, NodeError
from .options import RouterOptions
from .placement.node_prefixes import PromptKeys
from .placement.place import Placement, place
from .placement.policies import POLICIES, round_robin

log = logger("router")

# What ``read`` gives at the end of a stream; the stubs for grpc do not know it.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

OUTPUT = ("tokens", "finished", "prompt_logprobs")
MAX_ATTEMPTS = 4
# The keys of a prompt of this length are computed in a few milliseconds.
QUICK_TOKENS = 4096
# A request that kills its nodes must not go round and kill them all; prefill nodes count as well.
MAX_DEATHS = 2
# Added to the request's own deadline, so that the node's own answer about it arrives.
DEADLINE_MARGIN = 5.0


class GenerationError(NodeError):
    """A node gave one request up; another node may do better."""


class Dispatcher:
    """Finds nodes for one prompt. ``deadline`` is the whole request's, by the loop's clock."""

    def __init__(self, nodes: NodeTable, options: RouterOptions, deadline: float) -> None:
        self._nodes = nodes
        self._options = options
        self._deadline = deadline
        self._failed: frozenset[tuple[str, int]] = frozenset()
        self._deaths = 0

    async def run(
        self, request: pb.GenerateRequest, tokens: Sequence[int], *, streamed: bool
    ) -> AsyncGenerator[tuple[Node, pb.GenerateEvent], None]:
        """The node's events, with the node; ``Admitted`` comes first, and once. ``tokens`` are
        those of the request's prompt.

        Another node than before means that what came until then is void.
        """
        admitted = False
        failure: Exception | None = None
        prompt = PromptKeys(tokens, request.cache_salt)
        await self._compute_keys(prompt)
        while (placement := self._next(request, prompt)) is not None:
            node, booking = self._book(placement, prompt)
            started = seen = False
            try:
                async with aclosing(self._events(node, request)) as events:
                    async for event in events:
                        kind = event.WhichOneof("event")
                        if kind == "prefill_died":
                            self._deaths += 1
                            continue
                        if kind == "usage":
                            booking.settle(node.node_id, event.usage.prefill_node)
                        started = True
                        seen = seen or (streamed and kind in OUTPUT)
                        if kind != "admitted" or not admitted:
                            yield node, event
                        admitted = True
                return
            except (OverloadedError, UnavailableError, GenerationError) as error:
                if seen:
                    raise _mid_stream(error) from error
                log.warning(
                    "node %s failed request %s: %s", node.node_id, request.request_id, error
                )
                # "No room" says more to a client than what a later node's failure does.
                failure = failure if isinstance(failure, OverloadedError) else error
                self._failed |= {node.key}
                self._deaths += started
            finally:
                booking.settle()
        raise failure or UnavailableError("No decode node is available; try again soon.")

    async def _compute_keys(self, prompt: PromptKeys) -> None:
        """Those of a long prompt take tens of milliseconds, so placement should find them done."""
        if len(prompt.tokens) <= QUICK_TOKENS:
            return
        held = [node.prefixes for node in self._nodes]
        await asyncio.to_thread(lambda: [prefixes.sample(prompt) for prefixes in held])

    def _next(self, request: pb.GenerateRequest, prompt: PromptKeys) -> Placement | None:
        """Where to try next. Writes prefill candidates and time left into the request."""
        if len(self._failed) >= MAX_ATTEMPTS or self._deaths >= MAX_DEATHS:
            return None
        with step("placement") as span:
            turn = self._nodes.take_turn()
            policy = POLICIES[self._options.placement_policy]
            placement = place(
                self._nodes.views(prompt, turn, self._failed, every=policy is round_robin),
                prompt.tokens,
                policy,
                turn=turn,
                salt=prompt.salt,
                exclude=self._failed,
            )
            if placement is None:
                return None
            span.set(node=placement.decode.node_id, candidates=len(placement.prefill))
        request.deadline_seconds = self._seconds_left()
        request.deaths = self._deaths
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
        return placement

    def _book(self, placement: Placement, prompt: PromptKeys) -> tuple[Node, Booking]:
        """The decode node, and what is remembered of this placement until the nodes report it."""
        booking = Booking()
        held = placement.decode.held_tokens
        for view in placement.prefill[:1]:
            node = self._nodes[view.node_id]
            compute = len(prompt.tokens) - max(held, view.held_tokens)
            booking.enter(node.node_id, node.ledger, node.placed(prompt, compute))
        node = self._nodes[placement.decode.node_id]
        compute = 0 if placement.prefill else len(prompt.tokens) - held
        booking.enter(node.node_id, node.ledger, node.placed(prompt, compute))
        return node, booking

    def _seconds_left(self) -> float:
        left = self._deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(_LATE)
        return left

    async def _events(
        self, node: Node, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """One call. Leaving it in any way cancels it on the node."""
        with branch("call", node=node.node_id) as span:
            timeout = request.deadline_seconds + DEADLINE_MARGIN
            call = node.generate(request, timeout, metadata(span))
            async with aclosing(self._heard(node, call)) as events:
                async for event in events:
                    yield event

    async def _heard(self, node: Node, call: Any) -> AsyncGenerator[pb.GenerateEvent, None]:
        """What the node says, and what is wrong as one of our errors."""
        patience = self._options.admission_timeout
        try:
            async with asyncio.timeout(patience):
                event = await call.read()
            node.ejection.answered(call)
            while event is not EOF:
                if event.finished.reason == pb.FINISH_REASON_ERROR:
                    raise GenerationError(event.finished.error or "The generation failed.")
                yield event
                event = await call.read()
        except TimeoutError:
            self._nodes.unreachable(node, call, "no answer")
            message = f"A decode node did not answer within {patience:g} s."
            raise UnavailableError(message) from None
        except grpc.aio.AioRpcError as error:
            translated = _translated(error, node)
            if error.code() in _ON_THE_WAY and not isinstance(translated, DrainingError):
                self._nodes.unreachable(node, call, "unreachable")
            elif error.code() in _ANSWERS:
                node.ejection.answered(call)
            raise translated from error
        except asyncio.CancelledError:
            # The table cancels the calls of a lost node; any other cancellation is our own task's.
            if node.lost and not _cancelling():
                message = "The decode node that served this request is gone."
                raise UnavailableError(message) from None
            raise
        finally:
            node.done(call)


# A call that failed on its way to a node, or at its door.
_ON_THE_WAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
_ANSWERS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_LATE = "The request did not finish within its deadline."


def _mid_stream(error: Exception) -> Exception:
    """What a client is told that has seen a part of its answer."""
    if isinstance(error, DrainingError):
        return error
    failed = "The node that served this request failed."
    return NodeError(str(error) if isinstance(error, NodeError) else failed)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _translated(error: grpc.aio.AioRpcError, node: Node) -> Exception:
    """The node's status as one of ours. Details stay in the log: they hold addresses."""
    details = error.details() or ""
    gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    if gone and (node.draining or details.startswith(NODE_DRAINING)):
        log.info("node %s ended a request with its drain: %s", node.node_id, details)
        message = "The node that served this request was taken out of service; send it again."
        return DrainingError(message, code="node_draining")
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _request_error(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError("The server is overloaded; try again later.")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(_LATE)
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNAUTHENTICATED
        ):
            log.info("a decode node is unavailable: %s", details)
            return UnavailableError("The decode node that served this request is unavailable.")
        case code:
            log.error("a decode node failed with %s: %s", code.name, details)
            return GenerationError("The node that served this request failed.")


def _request_error(details: str) -> RequestError:
    """The details are the message, or JSON with message, param and code."""
    try:
        fields = json.loads(details)
        values = [fields.get(name) for name in ("message", "param", "code")]
    except (ValueError, AttributeError, RecursionError):
        values = [None] * 3
    message, param, code = (value if isinstance(value, str) else None for value in values)
    if message is None:
        return RequestError(details or "The node refused the request.")
    return RequestError(message, param=param, code=code)
