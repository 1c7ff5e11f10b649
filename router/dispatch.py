"""The events of one prompt, from whichever decode node serves it.

A node that lacks room, cannot be reached or dies is excluded, and the next one is called. Once
there is output, the next node gets the tokens so far and continues them, so that the client sees
nothing of it but a pause.
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
# The keys of a longer prompt are computed in a thread, since they take tens of milliseconds.
QUICK_TOKENS = 4096
# A request that kills its nodes must not go round and kill them all; prefill nodes count as well,
# and a node that has sent output only until another one has.
MAX_DEATHS = 2


class Dispatcher:
    """Finds nodes for one prompt. ``deadline`` is the whole request's, by the loop's clock."""

    def __init__(self, nodes: NodeTable, options: RouterOptions, deadline: float) -> None:
        self._nodes = nodes
        self._options = options
        self._deadline = deadline
        self._failed: frozenset[tuple[str, int]] = frozenset()
        self._deaths = 0
        self._admitted = False  # by any node
        self._started = False  # on the present node
        self._moves = 0  # after output
        self._usage: pb.Usage | None = None  # that has just come

    async def events(
        self,
        request: pb.GenerateRequest,
        tokens: Sequence[int],
        resume: Callable[[pb.GenerateRequest], bool] = lambda request: True,
    ) -> AsyncGenerator[tuple[Node, Sequence[NodeEvent]], None]:
        """The events of the node that serves the prompt ``tokens``, with the node: all that have
        arrived, at once. ``Admitted`` comes first, and once.

        Another node than before continues the output: ``resume`` writes into the request what has
        come of it, and returns false if nothing is left to generate. Without output the node begins
        anew, and all earlier events are void.
        """
        failure: Exception | None = None
        prompt = PromptKeys(tokens, request.cache_salt)
        if len(tokens) > QUICK_TOKENS:
            held = [node.prefixes for node in self._nodes]
            await asyncio.to_thread(lambda: [prefixes.sample(prompt) for prefixes in held])
        while (placement := self._next(request, prompt)) is not None:
            node, inflight = self._begin(placement, prompt)
            prefill = self._begin_prefill(placement, prompt)
            output = self._started = False
            try:
                with node_request(
                    self._nodes, node, request, self._options.admission_timeout
                ) as attempt:
                    while arrived := await attempt.read():
                        shown = self._shown(arrived)
                        if (usage := self._usage) is not None:
                            self._usage = None
                            inflight.end(node.node_id, usage.prefill_node)
                            self._nodes.prefills.finish(prefill, usage)
                        output = output or any(map(_is_output, shown))
                        yield node, shown
                return
            except (OverloadedError, UnavailableError, GenerationError) as error:
                log.warning(
                    "node %s failed request %s: %s", node.node_id, request.request_id, error
                )
                if output:
                    self._move(error)
                    if not resume(request):
                        yield node, ()
                        return
                # "No room" is more useful to a client than the failure of a later node.
                failure = failure if isinstance(failure, OverloadedError) else error
                self._failed |= {node.key}
                # A node that ends requests because it drains has not died of this one.
                self._deaths += self._started and not isinstance(error, DrainingError)
            finally:
                inflight.end()
                self._nodes.prefills.end(prefill)
        raise failure or UnavailableError(NO_NODE)

    def _move(self, error: Exception) -> None:
        """Note that a node which has sent output has failed. Raises its error if no other node is
        to continue."""
        self._moves += 1
        # Admitted is admitted: what overflows then is the output, which waits for its client.
        if self._moves > self._options.migration_limit or isinstance(error, OverloadedError):
            raise error
        # The request did not stop this node from working, and may have stopped the ones before.
        self._deaths, self._failed = 0, frozenset()
        reason = "draining" if isinstance(error, DrainingError) else "failed"
        self._nodes.migrations.labels(reason).inc()

    def _shown(self, events: Sequence[NodeEvent]) -> Sequence[NodeEvent]:
        """Those that the request sees."""
        if len(events) == 1 and isinstance(events[0], PlainTokens):
            return events
        return [event for event in events if self._shows(event)]

    def _shows(self, event: NodeEvent) -> bool:
        """Note what an event tells about nodes. True if the request sees the event."""
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
        """The next placement to try. Writes prefill candidates and the time left into the
        request."""
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
        request.deadline_seconds = self._seconds_left()
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
        """The decode node, and the prompt in the in-flight load of both nodes."""
        inflight = InflightPlacement()
        held = placement.decode.held_tokens
        for view in placement.prefill[:1]:
            node = self._nodes[view.node_id]
            compute = len(prompt.tokens) - max(held, view.held_tokens)
            inflight.begin(node.node_id, node.inflight_load, node.inflight_prompt(prompt, compute))
        node = self._nodes[placement.decode.node_id]
        compute = 0 if placement.prefill else len(prompt.tokens) - held
        inflight.begin(node.node_id, node.inflight_load, node.inflight_prompt(prompt, compute))
        return node, inflight

    def _begin_prefill(self, placement: Placement, prompt: PromptKeys) -> Prefill:
        """The prompt among those that the cluster page shows."""
        asked = placement.prefill[0].node_id if placement.prefill else ""
        return self._nodes.prefills.begin(asked, placement.decode.node_id, len(prompt.tokens))

    def _seconds_left(self) -> float:
        left = self._deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(LATE)
        return left


def _is_output(event: NodeEvent) -> bool:
    return isinstance(event, PlainTokens) or event.WhichOneof("event") in OUTPUT
