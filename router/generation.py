"""One parsed request, the same for every HTTP surface, and what serving it gives."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from ..proto import tandem_pb2 as pb
from ..shared.text.stop import StopStrings
from .served_model import ServedModel


def new_tokens(values: Iterable[int] = ()) -> array[int]:
    """Token ids in four bytes each; a list of them takes forty."""
    return array("I", values)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``text`` is kept for ``echo`` alone: what the client wrote, or its token ids as text."""

    tokens: array[int]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What the router does with a choice's tokens."""

    stop: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    echo: bool = False
    discard_output: bool = False  # max_tokens 0 with echo: only the prompt is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All a request asks for. ``max_tokens`` is per prompt, since each has its own room left."""

    request_id: str
    model: ServedModel
    prompts: list[EncodedPrompt]
    max_tokens: list[int]
    sampling: pb.Sampling
    text: TextOptions
    stream: bool
    include_usage: bool
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    ignored: Set[str] = frozenset()  # fields of the request that are not known

    @property
    def n(self) -> int:
        return self.sampling.n

    @property
    def scored_prompt(self) -> int | None:
        """Alternatives that the node is to give for each prompt token: as was asked for, or as the
        echo has them."""
        if self.prompt_logprobs is None and self.text.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprobs; ``offset`` is where its text begins in the choice's text."""

    token: int
    offset: int
    logprobs: pb.PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class AdmittedItem:
    """A node has taken the request; from here on the status is 200."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice. ``finish_reason`` comes once, with the last."""

    index: int
    text: str = ""
    tokens: Sequence[int] = ()
    scored: Sequence[Scored] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The next logprobs of one prompt, before any output of its choices."""

    prompt: int
    positions: Sequence[pb.PositionLogprobs]


@dataclass(frozen=True, slots=True)
class Restarted:
    """The node of one prompt died, and another begins afresh: what came for the prompt is void."""

    prompt: int


@dataclass(slots=True)
class Served:
    """Where one prompt is served, and what its decode node has said of computing it, if anything
    yet."""

    node: str
    computed: pb.Usage = field(default_factory=pb.Usage)


@dataclass(slots=True)
class Usage:
    """Summed over all prompts and choices of a request; ``served`` has the prompts by number, as
    soon as a node has one."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    remote_tokens: int = 0
    prefill_nodes: list[str] = field(default_factory=list)
    decode_nodes: list[str] = field(default_factory=list)
    served: dict[int, Served] = field(default_factory=dict)


Item = AdmittedItem | Delta | PromptScored | Restarted
