"""The usage of a request: tokens, nodes and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..proto import tandem_pb2 as pb


@dataclass(slots=True)
class ServedPrompt:
    """The decode nodes that served one prompt, one after the other, and the first one's report of
    its prefill."""

    number: int = 0
    nodes: list[str] = field(default_factory=list)
    prefill: pb.Usage = field(default_factory=pb.Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of a request: in the queue of its node (0 for several prompts, whose queues overlap),
    to the first token, from the first to the last token, and in total to the last token. ``gap`` is
    the mean time between two tokens of a choice, if any choice has two."""

    queue: float
    first_token: float
    generation: float
    total: float
    gap: float | None


@dataclass(slots=True)
class Usage:
    """Sums over all prompts and choices of a request. ``served`` has each prompt once a node has
    admitted it, including the prompts of later rounds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion tokens
    cached_tokens: int = 0  # prompt tokens in caches of decode nodes
    remote_tokens: int = 0  # prompt tokens whose KV came from prefill nodes
    remote_cached_tokens: int = 0  # of these, the tokens in caches of prefill nodes
    prefill_nodes: list[str] = field(default_factory=list)
    decode_nodes: list[str] = field(default_factory=list)
    served: list[ServedPrompt] = field(default_factory=list)
    timings: Timings | None = None  # set after the last token

    def add(self, served: ServedPrompt) -> None:
        """Add a prompt's cached and remote tokens, and its nodes."""
        prefill = served.prefill
        self.cached_tokens += prefill.cached_tokens
        self.remote_tokens += prefill.remote_tokens
        self.remote_cached_tokens += prefill.remote_cached_tokens
        self.decode_nodes += [name for name in served.nodes if name not in self.decode_nodes]
        if (name := prefill.prefill_node) and name not in self.prefill_nodes:
            self.prefill_nodes.append(name)

    @property
    def all_cached_tokens(self) -> int:
        """The prompt tokens that were not computed for this request."""
        return self.cached_tokens + self.remote_cached_tokens
