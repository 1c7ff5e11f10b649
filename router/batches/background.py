"""Serve the lines of batches, at the lowest priority."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...shared.config.limits import BACKGROUND_PRIORITY
from ..access.key_usage import KeyUsage
from ..errors import failure_of, invalid
from ..generation import GenerationRequest
from ..handler import DetachedRequest, GenerateHandler
from ..http.access_log import AccessRecord
from ..http.encoding import dump
from ..http.exchange import KeyOwner
from ..http.json_body import parse_json
from ..openai.errors import error_body
from ..options import RouterOptions
from ..served_model import ServedModel
from ..surface import Surface
from .result_line import BackgroundResponse


class BackgroundResponses:
    """Serves requests without a connection; errors become responses too. ``surface_of`` returns the
    surface for an endpoint and an owner. Requests count in the usage of their owner, and against
    its limits."""

    def __init__(
        self,
        handler: GenerateHandler,
        surface_of: Callable[[str, str], Surface],
        owner_named: Callable[[str], KeyOwner],
        usage: KeyUsage,
        options: RouterOptions,
    ) -> None:
        self._handler = handler
        self._surface_of = surface_of
        self._owner_named = owner_named
        self._usage = usage
        self._options = options

    async def __call__(self, endpoint: str, line: bytes, owner: str) -> BackgroundResponse:
        """The response to the body in ``line``, which has been validated."""
        surface = self._surface_of(endpoint, owner)
        access = AccessRecord("POST", surface.path)
        access.key = owner
        client = DetachedRequest(self._owner_named(owner), access)

        def parse(model: ServedModel) -> GenerationRequest:
            request = surface.parse(_body(line, model), model, self._options)
            return replace(request, stream=False, priority=BACKGROUND_PRIORITY)

        try:
            request = await self._handler.parse_detached(client, len(line), parse)
            formatter = surface.formatter(request, int(time.time()))
            async with self._handler.room(client, request) as memory:
                work = self._handler.serve_detached(surface, request, formatter, access, memory)
                body = dump(await work)
        except Exception as error:
            return self._error_response(error, access)
        access.status = 200
        self._note(access)
        usage = access.usage
        return BackgroundResponse(
            status=200,
            request_id=uuid.uuid4().hex,
            body=body,
            tokens=(
                usage.prompt_tokens,
                usage.all_cached_tokens,
                usage.completion_tokens,
                usage.reasoning_tokens,
            ),
        )

    def _error_response(self, error: Exception, access: AccessRecord) -> BackgroundResponse:
        failure = failure_of(error, "a request of a batch", retry_after=1)
        # Overload, no node at the moment, or a limit of the key: the batch tries again.
        has_retry_after = any(name == b"retry-after" for name, _ in failure.headers)
        transient = failure.status == 503 or has_retry_after
        if not transient:
            access.status, access.error = failure.status, failure.code or failure.kind
            self._handler.metrics.count_error(failure.status)
            self._note(access)
        return BackgroundResponse(
            status=failure.status,
            request_id=uuid.uuid4().hex,
            body=dump(error_body(failure)),
            transient=transient,
        )

    def _note(self, access: AccessRecord) -> None:
        """Count and log a request that has ended."""
        self._usage.count(access)
        if self._options.access_log:
            access.log()


def _body(line: bytes, model: ServedModel) -> Any:
    body = parse_json(line)["body"]
    if body.get("stream"):
        raise invalid("'stream' is not available in a batch.", "stream", "unsupported_value")
    return body
