"""One parsed request, the same for every surface, and the outputs of serving it."""

from __future__ import annotations

import secrets
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
    """An array of token ids with 4 bytes each; a list takes about 40."""
    return array("I", values)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``text`` is kept for ``echo`` only: the client's text, or the text of its token ids with
    special tokens ``spelled`` out, as in vLLM. ``second_text`` is the position of the second text
    of a pair, or 0."""

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
    reasoning_opened: bool | None = None  # by the prompt; False if the prompt closes it
    tools: ToolUse | None = None  # parse tool calls
    discard_output: bool = False  # for max_tokens 0 with echo, which returns the prompt only


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """Options for turning a prompt into a vector. With ``score``, the prompt is a pair of texts,
    and the vector is its score. ``dimensions`` 0 keeps all dimensions."""

    pooling: str | None
    normalize: bool
    dimensions: int = 0
    in_base64: bool = False
    score: bool = False

    def message(self, prompt: EncodedPrompt) -> pb.Embed:
        """The node's part of the options."""
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
    ``width`` beams have finished; without, once the running ones are unlikely to be better; with
    "never", once they cannot be."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    ends: frozenset[int]

    @property
    def ranked(self) -> int:
        """Continuations to rank in each step: enough for ``width`` that do not end a beam."""
        return max(2, 1 + len(self.ends)) * self.width

    @property
    def alternatives(self) -> int:
        """Continuations of each beam that nodes return."""
        return min(MAX_LOGPROBS, self.ranked + len(self.ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked and tokenized request. ``max_tokens`` has a value for each prompt, because their
    remaining context differs."""

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
    beams: BeamOptions | None = None  # beam search instead of sampling
    ignored: Set[str] = frozenset()  # unknown fields of the body
    embed: VectorOptions | None = None  # return a vector of each prompt instead of text

    @property
    def n(self) -> int:
        """Choices to generate for each prompt."""
        return self.sampling.n

    @property
    def returned(self) -> int:
        """Choices to return for each prompt."""
        return self.n if self.best is None else self.best

    @property
    def wants_logprobs(self) -> bool:
        """True if nodes must return logprobs: for the client, or to rank choices."""
        return self.logprobs is not None or self.best is not None

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives that nodes must return for each prompt token, for the client or for the
        echo."""
        if self.prompt_logprobs is None and self.text.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def output_token_limit(self) -> int:
        """Maximum number of tokens over all choices."""
        return self.n * sum(self.max_tokens)

    @property
    def choices(self) -> int:
        """Choices to generate over all prompts."""
        return len(self.prompts) * self.n


def extended(kind: type[Request], request: GenerationRequest, **more: Any) -> Request:
    """The request converted to the subclass ``kind``, with ``more`` fields."""
    return kind(**{each.name: getattr(request, each.name) for each in fields(request)} | more)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its logprobs; ``offset`` is where its text begins in the choice's text."""

    token: int
    offset: int
    logprobs: pb.PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A node has admitted the request, so its HTTP status is 200."""


# Not frozen: created once per token, and frozen dataclasses are four times slower to create.
@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice: reasoning, then text, then tool calls. Only the last delta has a
    ``finish_reason``: "tool_calls" if the choice has any, and "error" if it alone failed with
    ``error``."""

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
    """The next logprobs of one prompt; they precede the output of its choices."""

    prompt: int
    positions: Sequence[pb.PositionLogprobs]


@dataclass(frozen=True, slots=True)
class PromptEmbedded:
    """The vector of one prompt, as packed little-endian float32."""

    prompt: int
    values: bytes


# Each item is everything that has arrived since the last one.
Outputs = AsyncGenerator[Sequence["Output"], None]
# Serves one request.
Generate = Callable[[GenerationRequest], Outputs]
Output = RequestAdmitted | ChoiceDelta | PromptScores | PromptEmbedded


def generate_message(request: GenerationRequest, number: int) -> pb.GenerateRequest:
    """The message to a node for prompt ``number``, without deadline and prefill candidates."""
    sampling = pb.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = request.max_tokens[number]
    sampling.min_tokens = request.text.min_tokens
    if not sampling.HasField("seed"):  # otherwise another node could not continue the output
        sampling.seed = secrets.randbits(63)
    if request.wants_logprobs and not request.text.discard_output:
        sampling.logprobs = request.logprobs or 0
    if request.prompt_alternatives is not None:
        sampling.prompt_logprobs = request.prompt_alternatives
    suffix = f"-{number}" if len(request.prompts) > 1 else ""
    prompt = request.prompts[number]
    return pb.GenerateRequest(
        request_id=request.request_id + suffix,
        prompt=prompt.tokens.tolist(),  # three times as fast as the array
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        embed=None if request.embed is None else request.embed.message(prompt),
    )
