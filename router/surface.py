"""The interface between serving and HTTP APIs.

A ``Surface`` parses an API's requests, its ``ResponseFormatter`` writes responses, and an
``ErrorShape`` writes errors. Everything in between is the same for all APIs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from .errors import ApiError
from .generation import ChoiceDelta, Generate, GenerationRequest, Output, Outputs
from .http.memory_budget import MemoryShare
from .options import RouterOptions
from .result import ChoiceLogprobs, GenerationResult, PromptLogprobs, ResultCollector
from .served_model import ServedModel
from .usage import Usage


class Surface(ABC):
    """One route of an HTTP API that generates text."""

    path: str  # of its POST requests

    @abstractmethod
    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        """Check and tokenize a body, which is parsed JSON. Runs in a thread. Raises
        ``RequestError`` or ``ApiError``."""

    @abstractmethod
    def formatter(self, request: GenerationRequest, created: int) -> ResponseFormatter:
        """The formatter of one response; ``created`` is its Unix time."""

    def outputs(self, request: GenerationRequest, generate: Generate) -> Outputs:
        """The outputs of a request; by default ``generate``'s."""
        return generate(request)


class ErrorShape(Protocol):
    """Formats the errors of one API."""

    def error_body(self, error: ApiError) -> Any:
        """The JSON of an error response."""

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""


class ResponseFormatter(ABC):
    """Formats one response. A subclass overrides what its API has. Parts of a stream are complete
    server-sent events, or empty."""

    def opening(self) -> bytes:
        """The first events of a stream, once a node has admitted the request."""
        return b""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """The events of new output."""
        return b""

    def closing(self, usage: Usage) -> bytes:
        """The events after the last output."""
        return b""

    def end_of_stream(self) -> bytes:
        """The mark of a stream's regular end."""
        return b""

    async def store(self) -> None:  # noqa: B027
        """Store what the client may request after the response. Called before the last byte is
        sent."""

    def ping(self) -> bytes:
        """An event that clients ignore, sent to keep a stream alive."""
        return b""

    def choice_logprobs(self) -> ChoiceLogprobs | None:
        """An encoder for one choice's logprobs; ``None`` unless requested."""
        return None

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """An encoder for one prompt's logprobs; ``None`` unless requested."""
        return None

    def account_in(self, memory: MemoryShare) -> None:  # noqa: B027
        """Account in ``memory`` for what the formatter keeps of a stream."""

    def collector(self, request: GenerationRequest, memory: MemoryShare) -> Collector:
        """The collector of a response that is not streamed; accounts for its bytes in
        ``memory``."""
        return ResultCollector(request, self.choice_logprobs, self.prompt_logprobs, memory)

    @abstractmethod
    def whole(self, result: GenerationResult) -> Any:
        """The body of a response that is not streamed, for ``http.encoding.dump``."""


class Collector(Protocol):
    """Collects the outputs of one request."""

    def add(self, output: Output) -> None:
        """Add the next output."""

    def result(self, usage: Usage) -> GenerationResult:
        """The whole result, after the last output."""
