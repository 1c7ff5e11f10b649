"""The seam between serving and HTTP APIs.

A surface, such as those of ``openai/``, reads an API's requests, and writes results in its shape;
an ``ErrorShape`` writes its errors. Everything in between is the same for all surfaces.
"""

from __future__ import annotations

from typing import Any, Protocol

from .errors import ApiError
from .generation import ChoiceDelta, GenerationRequest, Usage
from .options import RouterOptions
from .result import ChoiceLogprobs, GenerationResult, PromptLogprobs
from .served_model import ServedModel


class Surface(Protocol):
    """One route of an HTTP API that generates text."""

    @property
    def path(self) -> str:
        """The path of its POST requests."""

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        """Check the parsed JSON of a body, and tokenize it. Runs in a thread. Raises
        ``RequestError`` or ``ApiError``."""

    def response(self, request: GenerationRequest, created: int) -> Response:
        """The formatter of one response; ``created`` is its Unix time."""


class ErrorShape(Protocol):
    """The errors of one API."""

    def error_body(self, error: ApiError) -> Any:
        """The JSON of an error response."""

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""


class Response(Protocol):
    """Formats one response. The bytes of a stream are complete server-sent events; empty ones are
    not written."""

    def opening(self) -> bytes:
        """The first events of a stream, once a node has admitted the request."""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """The events of new output."""

    def closing(self, usage: Usage) -> bytes:
        """The events after the last output."""

    def end_of_stream(self) -> bytes:
        """The mark of a stream's regular end."""

    def choice_logprobs(self) -> ChoiceLogprobs | None:
        """An encoder for one choice's logprobs; ``None`` if the request wants none."""

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """An encoder for one prompt's logprobs; ``None`` if the request wants none."""

    def whole(self, result: GenerationResult) -> Any:
        """The body of a response that is not streamed, for ``http.encoding.encode``."""
