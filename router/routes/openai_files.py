"""OpenAI's API: files."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from ..batches.file_store import FileStore, StoredFile
from ..batches.response_models import FileDeletion, FileList, FileObject
from ..batches.upload import PURPOSE, store_upload
from ..http.exchange import HttpExchange
from ..openai.response_models import OpenAIError
from .documentation import documented_errors
from .guards import KEY_CHECKED
from .responses import EncodedResponse
from .services import Exchange
from .stored import BatchFolder, Owner, page_of, page_parameters, query_parameter

MAX_LISTED = 10_000
UPLOAD_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    "purpose": {"type": "string", "enum": [PURPOSE]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer"},
                },
            }
        }
    },
}
LIST_PARAMETERS = [
    *page_parameters(MAX_LISTED, MAX_LISTED),
    query_parameter("purpose", {"type": "string"}, "Only files with this purpose."),
]
CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}

router = APIRouter(
    tags=["openai"], dependencies=KEY_CHECKED, responses=documented_errors(OpenAIError)
)


@router.post("/v1/files", openapi_extra={"requestBody": UPLOAD_BODY})
async def upload_file(exchange: Exchange, folder: BatchFolder, owner: Owner) -> FileObject:
    """Store a file of requests for a batch."""
    with folder.upload():
        file = await store_upload(exchange, folder.files, owner)
    return FileObject.model_validate(file.body())


@router.get("/v1/files", response_model=FileList, openapi_extra={"parameters": LIST_PARAMETERS})
async def list_files(
    request: Request, exchange: Exchange, folder: BatchFolder, owner: Owner
) -> Response:
    """The files of this key."""
    page = page_of(request, max_limit=MAX_LISTED, default=MAX_LISTED)
    purpose = request.query_params.get("purpose")
    return EncodedResponse(exchange, await folder.files.entries(owner, purpose, page))


@router.get("/v1/files/{file_id}")
async def show_file(file_id: str, folder: BatchFolder, owner: Owner) -> FileObject:
    """One file."""
    return FileObject.model_validate((await folder.files.get(file_id, owner)).body())


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, folder: BatchFolder, owner: Owner) -> FileDeletion:
    """Delete a file. Batches that have read it continue."""
    await folder.files.delete(file_id, owner)
    return FileDeletion(id=file_id)


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=CONTENT)
async def download_file(
    file_id: str, exchange: Exchange, folder: BatchFolder, owner: Owner
) -> Response:
    """The content of a file."""
    return _Content(exchange, folder.files, await folder.files.get(file_id, owner))


class _Content(Response):
    """The content of a file, which is read as fast as the client takes it."""

    def __init__(self, exchange: HttpExchange, files: FileStore, file: StoredFile) -> None:
        super().__init__()
        self._exchange = exchange
        self._files = files
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._file.bytes).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        await self._exchange.send(
            {"type": "http.response.start", "status": 200, "headers": headers}
        )
        position = 0
        while (chunk := await self._files.read(self._file, position)) is not None:
            data, position = chunk
            await self._exchange.write(data)
        await self._exchange.end_stream()
