"""OpenAI's API: batches."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from ..batches.request import CreateBatchRequest, ResultsExpireAfter, parse_batch
from ..batches.response_models import BatchList, BatchObject
from ..embeddings.surfaces import Embeddings
from ..http.json_body import parse_json
from ..openai.response_models import OpenAIError
from ..openai.surfaces import ChatCompletions, Completions
from ..responses.continued_conversation import Conversations
from ..responses.surface import BatchedResponses
from ..surface import Surface
from .documentation import documented, documented_errors
from .guards import KEY_CHECKED
from .services import Exchange, RouterServices, Services
from .stored import BatchFolder, Owner, page_of, page_parameters

MODELS = (CreateBatchRequest, ResultsExpireAfter, BatchObject)
SURFACES: tuple[Surface, ...] = (ChatCompletions(), Completions(), Embeddings())
ENDPOINTS = (*(surface.path for surface in SURFACES), BatchedResponses.path)
MAX_LISTED, LISTED = 100, 20

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


def surface_of(endpoint: str, owner: str, services: Services) -> Surface:
    """The surface for the requests of a batch of ``owner``."""
    if endpoint == BatchedResponses.path:
        conversations = Conversations(services.responses, services.approvals, owner)
        return BatchedResponses(services.chat, conversations)
    return next(surface for surface in SURFACES if surface.path == endpoint)


@router.post("/v1/batches", **documented(CreateBatchRequest, BatchObject))
async def create_batch(
    exchange: Exchange, services: RouterServices, folder: BatchFolder, owner: Owner
) -> BatchObject:
    """Serve the requests of a file in the background."""
    with services.handler.bodies.share() as share:
        body = await exchange.body(share)
        value = await asyncio.to_thread(parse_json, body)
    batch = await folder.batches.create(parse_batch(value, owner, ENDPOINTS))
    folder.wake()
    return BatchObject.model_validate(batch.body())


@router.get("/v1/batches", openapi_extra={"parameters": page_parameters(MAX_LISTED, LISTED)})
async def list_batches(request: Request, folder: BatchFolder, owner: Owner) -> BatchList:
    """The batches of this key."""
    page = page_of(request, max_limit=MAX_LISTED, default=LISTED)
    return BatchList.model_validate(await folder.batches.entries(owner, page))


@router.get("/v1/batches/{batch_id}")
async def show_batch(batch_id: str, folder: BatchFolder, owner: Owner) -> BatchObject:
    """One batch."""
    return BatchObject.model_validate((await folder.batches.get(batch_id, owner)).body())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, folder: BatchFolder, owner: Owner) -> BatchObject:
    """End a batch with the results so far."""
    batch = await folder.batches.cancel(batch_id, owner)
    folder.wake()
    return BatchObject.model_validate(batch.body())
