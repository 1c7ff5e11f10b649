"""One attempt to serve one prompt; discarded when another node takes over."""

from __future__ import annotations

from collections.abc import Iterator

from ..proto import tandem_pb2 as pb
from .choice import ChoiceStream
from .cluster.node import Node
from .echo import PIECE_TOKENS, Echo
from .errors import NodeError
from .generation import (
    ChoiceDelta,
    GenerationRequest,
    Output,
    PromptEmbedded,
    PromptScores,
    RequestAdmitted,
    ServedPrompt,
    Usage,
)


class NodeAttempt:
    """One prompt and its n choices on one node; turns its events into outputs."""

    def __init__(self, request: GenerationRequest, number: int, node: Node) -> None:
        self.node = node
        self._number = number
        self._echo = Echo(request, number) if request.text.echo else None
        offset = len(self._echo.text) if self._echo else 0
        first = number * request.n
        self._choices = [ChoiceStream(request, first + i, offset) for i in range(request.n)]
        self.served = ServedPrompt(node.node_id)
        self._stopped: list[int] = []

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def take(self, event: pb.GenerateEvent) -> Iterator[Output]:
        """The outputs of one event. Raises ``NodeError`` for a choice that was not requested."""
        match event.WhichOneof("event"):
            case "admitted":
                yield RequestAdmitted()
            case "usage":
                self.served.computed = event.usage
            case "prompt_logprobs":
                positions = event.prompt_logprobs.positions
                if self._echo:
                    self._echo.score(positions)
                # An older node sends all of them at once.
                for start in range(0, max(1, len(positions)), PIECE_TOKENS):
                    yield PromptScores(self._number, positions[start : start + PIECE_TOKENS])
            case "embedding":
                yield PromptEmbedded(self._number, event.embedding.values)
            case "tokens":
                choice = self._choice(event.tokens.index)
                deltas = choice.push(event.tokens.tokens, event.tokens.logprobs)
                if deltas and choice.finished:
                    self._stopped.append(event.tokens.index)
                yield from self._with_echo(deltas)
            case "finished":
                choice = self._choice(event.finished.index)
                yield from self._with_echo(choice.finish(event.finished))

    def take_stopped(self) -> list[int]:
        """The choices that stop strings have ended since the last call of this method, unknown to
        the node. Empty once all choices have finished, which ends the whole call."""
        stopped, self._stopped = self._stopped, []
        return [] if self.finished else stopped

    def account(self, usage: Usage) -> None:
        """Add this prompt's tokens and nodes to the request's."""
        usage.completion_tokens += sum(choice.tokens for choice in self._choices)
        usage.reasoning_tokens += sum(choice.reasoning_tokens for choice in self._choices)
        usage.add(self.served)

    def _with_echo(self, deltas: list[ChoiceDelta]) -> Iterator[Output]:
        for delta in deltas:
            if self._echo and delta.index not in self._echo.shown:
                yield from self._echo.deltas(delta.index)
            yield delta

    def _choice(self, index: int) -> ChoiceStream:
        if index >= len(self._choices):
            raise NodeError("The node sent output of a choice that was not requested.")
        return self._choices[index]
