"""Answers to the lines of batches, at the lowest priority."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ...shared.telemetry.logs import logger
from ..errors import internal_error, invalid, to_api_error
from ..handler import GenerateHandler
from ..http.encoding import dump
from ..http.json_body import parse_json
from ..openai.error_body import error_body
from ..served_model import ServedModel
from ..surface import Surface
from .result_line import BackgroundAnswer

log = logger("router")


class BackgroundAnswers:
    """Serves requests that come from no connection; errors become answers too."""

    def __init__(self, handler: GenerateHandler, surfaces: Mapping[str, Surface]) -> None:
        self._handler = handler
        self._surfaces = surfaces

    async def __call__(self, endpoint: str, line: bytes) -> BackgroundAnswer:
        """The answer to the body in a line, which has been validated."""
        request_id = uuid.uuid4().hex
        try:
            body, usage = await self._handler.answer(
                self._surfaces[endpoint], lambda model: _body(line, model), len(line)
            )
        except Exception as error:
            failure = to_api_error(error, retry_after=1)
            if failure is None:
                log.error("a request of a batch failed", exc_info=error)
                failure = internal_error()
            failed = [dump(error_body(failure))]
            return BackgroundAnswer(status=failure.status, request_id=request_id, body=failed)
        tokens = (
            usage.prompt_tokens,
            usage.all_cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        )
        return BackgroundAnswer(status=200, request_id=request_id, body=body, tokens=tokens)


def _body(line: bytes, model: ServedModel) -> Any:
    body = parse_json(line, model.max_model_len)["body"]
    if body.get("stream"):
        raise invalid("'stream' is not available in a batch.", "stream", "unsupported_value")
    return body
