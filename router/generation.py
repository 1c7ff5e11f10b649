"""One parsed request, the same for every surface, and the outputs of serving it."""

from __future__ import annotations

from array import array
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from ..proto import tandem_pb2 as pb
from ..proto.packed_logprobs import MAX_LOGPROBS
from ..shared.errors import RequestError
from ..shared.text.output import CallDelta
from ..shared.text.reasoning import NO_PARSER
from ..shared.text.stop import StopStrings
from ..shared.text.tool_parsers.tool_use import ToolUse
from .served_model import ServedModel

Request = TypeVar("Request", bound="GenerationRequest")
EarlyStopping = Literal[False, True, "never"]


def new_tokens(values: Iterable[int] = ()) -> array[int]:
    """An array of token ids, of four bytes each; a list of them takes forty."""
    return array("I", values)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``text`` is kept for ``echo`` only: the client's text, or the text of its token ids, in which
    special tokens are ``spelled`` as in vLLM. ``second_text`` is where the second segment of a pair
    of texts begins, if there is one."""

    tokens: array[int]
    text: str | None = None
    spelled: bool = False
    second_text: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options for turning a choice's tokens into text."""

    stop: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    echo: bool = False
    reasoning_parser: str = NO_PARSER
    reasoning_opened: bool | None = None  # by the end of the prompt, which may also close it
    tools: ToolUse | None = None  # calls are parsed
    discard_output: bool = False  # max_tokens 0 with echo: only the prompt is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """Options for turning a prompt into a vector, or a pair of texts into its ``score`` as a vector
    of one number. ``dimensions`` is 0 for all of them."""

    pooling: str | None
    normalize: bool
    dimensions: int = 0
    in_base64: bool = False
    score: bool = False

    def message(self, prompt: EncodedPrompt) -> pb.Embed:
        """The options that a node needs."""
        return pb.Embed(
            pooling=self.pooling or "",
            normalize=self.normalize,
            dimensions=self.dimensions,
            score=self.score,
            second_text=prompt.second_text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """``ends`` are the tokens that end a beam. With ``early_stopping`` the search ends as soon as
    ``width`` beams have; without, once the running ones are unlikely to be better; with "never",
    once they cannot be."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    ends: frozenset[int]

    @property
    def ranked(self) -> int:
        """Continuations that are ranked in each step: enough for ``width`` that do not end."""
        return max(2, 1 + len(self.ends)) * self.width

    @property
    def alternatives(self) -> int:
        """Continuations of one beam that are known."""
        return min(MAX_LOGPROBS, self.ranked + len(self.ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked and tokenized request. ``max_tokens`` has a value for each prompt, since the room
    left in the context differs."""

    request_id: str
    model: ServedModel
    prompts: list[EncodedPrompt]
    max_tokens: list[int]
    sampling: pb.Sampling
    text: TextOptions
    stream: bool
    best: int | None = None  # of the n choices of each prompt, the number to return
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    beams: BeamOptions | None = None  # search, instead of drawing
    ignored: Set[str] = frozenset()  # unknown fields of the request
    embed: VectorOptions | None = None  # generate nothing: return a vector of each prompt

    @property
    def n(self) -> int:
        """Choices that are generated for each prompt."""
        return self.sampling.n

    @property
    def returned(self) -> int:
        """Choices of each prompt in the response."""
        return self.n if self.best is None else self.best

    @property
    def wants_logprobs(self) -> bool:
        """True if the node must return logprobs: for the client, or to find the best choices."""
        return self.logprobs is not None or self.best is not None

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives that the node must return for each prompt token: as requested, or as the
        echo needs them."""
        if self.prompt_logprobs is None and self.text.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def output_token_limit(self) -> int:
        """Tokens of all choices, if each is as long as it may be."""
        return self.n * sum(self.max_tokens)

    @property
    def choices(self) -> int:
        """Choices that are generated for all prompts."""
        return len(self.prompts) * self.n


def extended(kind: type[Request], request: GenerationRequest, **more: Any) -> Request:
    """The request as one of a subclass, with ``more`` fields."""
    return kind(**{each.name: getattr(request, each.name) for each in fields(request)} | more)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its logprobs; ``offset`` is where its text begins in the choice's text."""

    token: int
    offset: int
    logprobs: pb.PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A node has admitted the request; from here on its HTTP status is 200."""


# Not frozen: to make one would take four times as long, and each token makes one.
@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice: its reasoning, then its text, then its calls. ``finish_reason``
    comes once, with the last; it is "tool_calls" for a choice that ended after calls, and "error"
    for one that ended with an ``error`` while others go on."""

    index: int
    text: str = ""
    tokens: Sequence[int] = ()
    scored: Collection[ScoredToken] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The next logprobs of one prompt, before any output of its choices."""

    prompt: int
    positions: Sequence[pb.PositionLogprobs]


@dataclass(frozen=True, slots=True)
class PromptEmbedded:
    """The vector of one prompt, as packed float32 in little-endian order."""

    prompt: int
    values: bytes


# Each time all that have arrived.
Outputs = AsyncGenerator[Sequence["Output"], None]
# Computes the outputs of one generation.
Generate = Callable[[GenerationRequest], Outputs]
Output = RequestAdmitted | ChoiceDelta | PromptScores | PromptEmbedded
