"""The state of one prompt while it is served: turns the events of its nodes into outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..proto import tandem_pb2 as pb
from .choice import ChoiceStream
from .cluster.node import Node
from .echo import Echo
from .errors import NodeError
from .generation import (
    ChoiceDelta,
    GenerationRequest,
    Output,
    PromptEmbedded,
    PromptScores,
    RequestAdmitted,
)
from .node_streams.events import NodeEvent, PlainTokens
from .node_streams.logprobs import check_logprobs
from .usage import ServedPrompt, Usage


class PromptOutputs:
    """One prompt and its n choices, on one node at a time. After a failure, the next node continues
    where the last one stopped."""

    def __init__(self, request: GenerationRequest, number: int) -> None:
        self.node: Node | None = None
        self._number = number
        self._max_tokens = request.max_tokens[number]
        self._prompt_tokens = len(request.prompts[number].tokens)
        self._echo = Echo(request, number) if request.text.echo else None
        offset = len(self._echo.text) if self._echo else 0
        first = number * request.n
        self._choices = [ChoiceStream(request, first + i, offset) for i in range(request.n)]
        # A response with one choice fails as a whole; best_of needs all choices to succeed.
        self._fails_as_one = request.choices == 1 or request.best is not None
        self.served = ServedPrompt(number)
        self.finished = False
        self.stopped: list[int] = []
        self._scored = 0  # prompt positions with logprobs
        self._pending: list[Output] = []  # ends of choices, found while moving to another node
        self._repeated = 0  # scored positions that the present node will send again

    @property
    def has_output(self) -> bool:
        """True once a node has sent output, which other nodes must not repeat."""
        return self._scored > 0 or any(choice.has_output for choice in self._choices)

    def move_to(self, node: Node) -> None:
        """Take the following events as this node's."""
        self.node = node
        self._repeated = self._scored
        if not self.has_output:
            self.served.nodes.clear()
            self.served.prefill = pb.Usage()
        self.served.nodes.append(node.node_id)

    def resume(self, message: pb.GenerateRequest) -> bool:
        """Write into ``message`` what the next node needs to continue from here. False if nothing
        is left to generate."""
        running = [(i, choice) for i, choice in enumerate(self._choices) if not choice.finished]
        for i, choice in running:
            # The node failed after the last token, before it could report the end.
            if len(choice.token_ids) >= self._max_tokens:
                finished = pb.Finished(index=i, reason=pb.FINISH_REASON_LENGTH)
                self._pending += self._finish(finished)
        del message.resume[:]
        if any(choice.has_output for choice in self._choices):
            message.resume.extend(
                pb.Resumed(index=i, tokens=choice.token_ids)
                for i, choice in running
                if not choice.finished
            )
        if self._scored >= self._prompt_tokens - 1:
            message.sampling.ClearField("prompt_logprobs")
        return not self.finished

    def take(self, events: Sequence[NodeEvent]) -> list[Output]:
        """Turn events into outputs. Raises ``NodeError`` for a choice that was not requested and
        for malformed logprobs, and ``RequestError`` if the only choice cannot follow its
        grammar."""
        outputs, self._pending = self._pending, []
        for event in events:
            if isinstance(event, PlainTokens):
                outputs += self._push(event.index, event.tokens, ())
            else:
                outputs += self._take(event)
        return outputs

    def _take(self, event: pb.GenerateEvent) -> Iterable[Output]:
        match event.WhichOneof("event"):
            case "admitted":
                return [RequestAdmitted()]
            case "usage":
                if not self.has_output:
                    self.served.prefill = event.usage
            case "prompt_logprobs":
                check_logprobs(event.prompt_logprobs.positions)
                return self._prompt_scores(event.prompt_logprobs.positions)
            case "embedding":
                return [PromptEmbedded(self._number, event.embedding.values)]
            case "tokens":
                tokens = event.tokens
                check_logprobs(tokens.logprobs, len(tokens.tokens))
                return self._push(tokens.index, tokens.tokens, tokens.logprobs)
            case "finished":
                check_logprobs([event.finished.stop_logprobs])
                return self._finish(event.finished)
        return ()

    def _push(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[pb.PositionLogprobs]
    ) -> list[ChoiceDelta]:
        choice = self._choice(index)
        deltas = choice.push(tokens, logprobs)
        if choice.finished and deltas:
            self.stopped.append(index)
            self._update_finished()
        return self._with_echo(deltas) if self._echo else deltas

    def _finish(self, finished: pb.Finished) -> list[ChoiceDelta]:
        deltas = self._choice(finished.index).finish(finished)
        if deltas and deltas[-1].error is not None and self._fails_as_one:
            raise deltas[-1].error
        self._update_finished()
        return self._with_echo(deltas) if self._echo else deltas

    def _update_finished(self) -> None:
        self.finished = all(choice.finished for choice in self._choices)

    def _prompt_scores(self, positions: Sequence[pb.PositionLogprobs]) -> Iterable[Output]:
        repeated = min(self._repeated, len(positions))
        self._repeated -= repeated
        positions = positions[repeated:]
        self._scored += len(positions)
        if self._echo:
            self._echo.score(positions)
        return [PromptScores(self._number, positions)]

    def take_stopped(self) -> list[int]:
        """Take the choices that stop strings have ended since the last call; the node still
        generates them. Empty once all choices have finished, since the whole request then ends."""
        stopped, self.stopped = self.stopped, []
        return [] if self.finished else stopped

    def account(self, usage: Usage) -> None:
        """Add this prompt's tokens and nodes to the request's."""
        usage.completion_tokens += sum(choice.tokens for choice in self._choices)
        usage.reasoning_tokens += sum(choice.reasoning_tokens for choice in self._choices)
        usage.add(self.served)

    def _with_echo(self, deltas: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """The deltas, with the prompt before the first delta of each choice."""
        echoed: list[ChoiceDelta] = []
        for delta in deltas:
            if self._echo and delta.index not in self._echo.echoed:
                echoed += self._echo.deltas(delta.index)
            echoed.append(delta)
        return echoed

    def _choice(self, index: int) -> ChoiceStream:
        if index >= len(self._choices):
            raise NodeError("The node sent output for a choice that was not requested.")
        return self._choices[index]
