"""OpenAI's file and batch objects, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from .rows import BatchColumns


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeletion(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchLineError(BaseModel):
    """An error of the input file; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None


class BatchLineErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchLineError]


class BatchCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchInputTokens(BaseModel):
    cached_tokens: int


class BatchOutputTokens(BaseModel):
    reasoning_tokens: int


class BatchTokenUsage(BaseModel):
    input_tokens: int
    input_tokens_details: BatchInputTokens
    output_tokens: int
    output_tokens_details: BatchOutputTokens
    total_tokens: int


class BatchObject(BatchColumns):
    object: Literal["batch"]
    errors: BatchLineErrors | None
    request_counts: BatchCounts
    usage: BatchTokenUsage
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
