"""The events of one prompt, from whichever decode node serves it.

A node that is full, unreachable or dead is excluded, and the next one is tried. Once there is
output, the next node gets the tokens so far and continues them: the client only sees a pause.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

from ..proto import tandem_pb2 as pb
from ..shared.errors import OverloadedError, UnavailableError
from ..shared.telemetry.logs import logger
from ..shared.telemetry.tracing import step
from .cluster.inflight import InflightPlacement
from .cluster.node import Node
from .cluster.node_table import NodeTable
from .errors import DeadlineError, DrainingError
from .node_request import LATE, GenerationError, node_request
from .node_streams.events import NodeEvent, PlainTokens
from .options import RouterOptions
from .placement.node_prefixes import PromptKeys
from .placement.place import Placement
from .placement.policies import POLICIES
from .placement.recent_prefills import Prefill

log = logger("router")

OUTPUT = frozenset({"tokens", "finished", "prompt_logprobs"})
NO_NODE = "No decode node is available; try again soon."
MAX_ATTEMPTS = 4
# Prefix keys of a longer prompt take tens of milliseconds, so a thread computes them.
QUICK_TOKENS = 4096
# Limits how many nodes one request can crash, prefill nodes included. Output from a later node
# clears the count.
MAX_DEATHS = 2


class Dispatcher:
    """Finds nodes for one prompt. ``deadline`` is the request's, in the event loop's time."""

    def __init__(self, nodes: NodeTable, options: RouterOptions, deadline: float) -> None:
        self._nodes = nodes
        self._options = options
        self._deadline = deadline
        self._failed: frozenset[tuple[str, int]] = frozenset()
        self._deaths = 0
        self._admitted = False  # by any node
        self._started = False  # on the present node
        self._moves = 0  # after output
        self._usage: pb.Usage | None = None  # from the latest events

    async def events(
        self,
        request: pb.GenerateRequest,
        tokens: Sequence[int],
        resume: Callable[[pb.GenerateRequest], bool] = lambda request: True,
    ) -> AsyncGenerator[tuple[Node, Sequence[NodeEvent]], None]:
        """Yield the node that serves the prompt ``tokens`` with all its events since the last item.
        ``Admitted`` comes first, and only once.

        If the node changes after it has sent output, the next one continues that: ``resume`` writes
        the output so far into the request, and returns false if nothing is left to generate. If
        there was no output, the next node starts over, and all earlier events are void.
        """
        failure: Exception | None = None
        prompt = PromptKeys(tokens, request.cache_salt)
        if len(tokens) > QUICK_TOKENS:
            prefixes = [node.prefixes for node in self._nodes]
            await asyncio.to_thread(lambda: [each.sample(prompt) for each in prefixes])
        while (placement := self._next(request, prompt)) is not None:
            node, inflight = self._begin(placement, prompt)
            prefill = self._begin_prefill(placement, prompt)
            output = self._started = False
            try:
                with node_request(
                    self._nodes, node, request, self._options.admission_timeout
                ) as attempt:
                    while events := await attempt.read():
                        visible = self._visible(events)
                        if (usage := self._usage) is not None:
                            self._usage = None
                            inflight.end(node.node_id, usage.prefill_node)
                            self._nodes.prefills.finish(prefill, usage)
                        output = output or any(map(_is_output, visible))
                        yield node, visible
                return
            except (OverloadedError, UnavailableError, GenerationError) as error:
                reason = error.__cause__ or error  # what the node said, with addresses
                log.warning(
                    "node %s failed request %s: %s", node.node_id, request.request_id, reason
                )
                if output:
                    self._move(error)
                    if not resume(request):
                        yield node, ()
                        return
                # "No room" is more useful to a client than the failure of a later node.
                failure = failure if isinstance(failure, OverloadedError) else error
                self._failed |= {node.key}
                # A draining node was not crashed by this request.
                self._deaths += self._started and not isinstance(error, DrainingError)
            finally:
                inflight.end()
                self._nodes.prefills.end(prefill)
        raise failure or UnavailableError(NO_NODE)

    def _move(self, error: Exception) -> None:
        """Record that a node failed after it had sent output. Raises its error if no other node
        may continue."""
        self._moves += 1
        # An overload after admission: the client reads too slowly, and the output has overflowed.
        if self._moves > self._options.migration_limit or isinstance(error, OverloadedError):
            raise error
        # The node has sent output, so the request is unlikely to have crashed the earlier ones.
        self._deaths, self._failed = 0, frozenset()
        reason = "draining" if isinstance(error, DrainingError) else "failed"
        self._nodes.migrations.labels(reason).inc()

    def _visible(self, events: Sequence[NodeEvent]) -> Sequence[NodeEvent]:
        """The events to pass on to the request."""
        if len(events) == 1 and isinstance(events[0], PlainTokens):
            return events
        return [event for event in events if self._observe(event)]

    def _observe(self, event: NodeEvent) -> bool:
        """Record what an event says about nodes. True if the request gets the event."""
        if isinstance(event, PlainTokens):
            return True
        kind = event.WhichOneof("event")
        if kind == "prefill_died":
            self._deaths += 1
            return False
        self._started = True
        if kind == "usage":
            self._usage = event.usage
        if kind == "admitted":
            again, self._admitted = self._admitted, True
            return not again
        return True

    def _next(self, request: pb.GenerateRequest, prompt: PromptKeys) -> Placement | None:
        """The next placement to try. Writes the prefill candidates and the remaining seconds into
        the request."""
        if len(self._failed) >= MAX_ATTEMPTS or self._deaths >= MAX_DEATHS:
            return None
        request.deaths = self._deaths
        request.internal_id = secrets.randbits(64)
        with step("placement") as span:
            policy = POLICIES[self._options.placement_policy]
            placement = self._nodes.place(prompt, policy, self._failed)
            if placement is None:
                return None
            span.set(node=placement.decode.node_id, candidates=len(placement.prefill))
        request.deadline_seconds = self._remaining_seconds()
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

    def _begin(self, placement: Placement, prompt: PromptKeys) -> tuple[Node, InflightPlacement]:
        """The decode node, and the prompt's entry in the in-flight load of both nodes."""
        inflight = InflightPlacement()
        cached = placement.decode.held_tokens
        for view in placement.prefill[:1]:
            node = self._nodes[view.node_id]
            compute = len(prompt.tokens) - max(cached, view.held_tokens)
            inflight.begin(node.node_id, node.inflight_load, node.inflight_prompt(prompt, compute))
        node = self._nodes[placement.decode.node_id]
        compute = 0 if placement.prefill else len(prompt.tokens) - cached
        inflight.begin(node.node_id, node.inflight_load, node.inflight_prompt(prompt, compute))
        return node, inflight

    def _begin_prefill(self, placement: Placement, prompt: PromptKeys) -> Prefill:
        """The prompt's entry on the cluster page."""
        prefill_node = placement.prefill[0].node_id if placement.prefill else ""
        decode_node = placement.decode.node_id
        return self._nodes.prefills.begin(prefill_node, decode_node, len(prompt.tokens))

    def _remaining_seconds(self) -> float:
        remaining = self._deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineError(LATE)
        return remaining


def _is_output(event: NodeEvent) -> bool:
    return isinstance(event, PlainTokens) or event.WhichOneof("event") in OUTPUT
