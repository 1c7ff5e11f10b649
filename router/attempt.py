"""What one node has said about one prompt; thrown away when another node takes over."""

from __future__ import annotations

from collections.abc import Iterator

from ..proto import tandem_pb2 as pb
from .choice import Choice
from .cluster.node import Node
from .echo import PIECE_TOKENS, Echo
from .errors import NodeError
from .generation import AdmittedItem, Delta, Generation, Item, PromptScored, Served, Usage


class NodeAttempt:
    """One prompt and its n choices on one node: its events become items."""

    def __init__(self, generation: Generation, number: int, node: Node) -> None:
        self.node = node
        self._number = number
        self._echo = Echo(generation, number) if generation.text.echo else None
        offset = len(self._echo.text) if self._echo else 0
        first = number * generation.n
        self._choices = [Choice(generation, first + i, offset) for i in range(generation.n)]
        self.served = Served(node.node_id)
        self._cut_off: list[int] = []

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def take(self, event: pb.GenerateEvent) -> Iterator[Item]:
        """The items of one event. Raises ``NodeError`` for a choice that was not asked for."""
        match event.WhichOneof("event"):
            case "admitted":
                yield AdmittedItem()
            case "usage":
                self.served.computed = event.usage
            case "prompt_logprobs":
                positions = event.prompt_logprobs.positions
                if self._echo:
                    self._echo.score(positions)
                # An older node sends all of them at once.
                for start in range(0, max(1, len(positions)), PIECE_TOKENS):
                    yield PromptScored(self._number, positions[start : start + PIECE_TOKENS])
            case "tokens":
                choice = self._choice(event.tokens.index)
                delta = choice.push(event.tokens.tokens, event.tokens.logprobs)
                if delta is not None and choice.finished:
                    self._cut_off.append(event.tokens.index)
                yield from self._show(delta)
            case "finished":
                choice = self._choice(event.finished.index)
                yield from self._show(choice.finish(event.finished))

    def cut_off(self) -> list[int]:
        """The choices that stop strings have ended since it was last asked, while others go on: the
        node does not know of it."""
        ended, self._cut_off = self._cut_off, []
        return [] if self.finished else ended

    def account(self, usage: Usage) -> None:
        """Add what this prompt cost, and where it ran."""
        computed = self.served.computed
        usage.completion_tokens += sum(choice.tokens for choice in self._choices)
        usage.cached_tokens += computed.cached_tokens
        usage.remote_tokens += computed.remote_tokens
        for name, names in (
            (self.node.node_id, usage.decode_nodes),
            (computed.prefill_node, usage.prefill_nodes),
        ):
            if name and name not in names:
                names.append(name)

    def _show(self, delta: Delta | None) -> Iterator[Item]:
        if delta is None:
            return
        if self._echo and delta.index not in self._echo.shown:
            yield from self._echo.deltas(delta.index)
        yield delta

    def _choice(self, index: int) -> Choice:
        if index >= len(self._choices):
            raise NodeError("The node answered for a choice that was not asked for.")
        return self._choices[index]
