"""POST /v1/responses/compact: a conversation in which a summary stands for what the model wrote."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...generation import GenerationRequest
from ...options import RouterOptions
from ...requests.body_model import AnswerModel, BodyModel, DocumentedAs
from ...result import GenerationResult
from ...served_model import ServedModel
from ...surface import WholeResponse
from ..continued_conversation import Conversations
from ..input_items import Item, compaction_item, encoded
from ..response_body import response_usage
from .summary import checked_summary, parse_summary


class CompactResponseRequest(BodyModel):
    """The body of POST /v1/responses/compact."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conversation": (), "image": ()}

    model: Annotated[str, Field(max_length=1024)]
    input: Annotated[Any, DocumentedAs(str | list[dict[str, Any]])] = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    # No effect: fields of OpenAI's accounting.
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class CompactedResponse(AnswerModel):
    """The user's messages, and an item with the summary of everything else."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class Compaction:
    """POST /v1/responses/compact, for one request. The model writes the summary, as the answer to a
    last message of the conversation."""

    path = "/v1/responses/compact"

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._kept: list[Item]

    def parse(self, body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
        ignored: set[str] = set()
        asked = CompactResponseRequest.read(body, ignored)
        conversation = self._conversations.read(asked.input, asked.previous_response_id, ignored)
        self._kept = [item for item in conversation.whole if item.get("role") == "user"]
        sampling = {"model": asked.model}
        request = parse_summary(sampling, asked.instructions, conversation.whole, model, options)
        request_id = f"resp_{uuid.uuid4().hex}"
        return replace(request, request_id=request_id, ignored={*ignored, *request.ignored})

    def response(self, request: GenerationRequest, created: int) -> CompactionResponse:
        return CompactionResponse(request.request_id, created, self._kept)


class CompactionResponse(WholeResponse):
    """Formats one response, which is never streamed."""

    def __init__(self, response_id: str, created: int, kept: list[Item]) -> None:
        self._id = response_id
        self._created = created
        self._kept = kept

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        content = encoded(checked_summary(result.choices[0].text))
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": self._created,
            "output": [*self._kept, compaction_item(f"cmp_{uuid.uuid4().hex}", content)],
            "usage": response_usage(result.usage),
        }
