"""POST /v1/files: store a form's file while it arrives."""

from __future__ import annotations

import asyncio
import time

from ...shared.process.tasks import uninterrupted
from ..errors import ApiError, invalid
from ..http.exchange import CLOSE, HttpExchange
from .file_store import PIECE_BYTES, UPLOAD_SECONDS, FileStore, StoredFile
from .multipart import MAX_FIELD_BYTES, MultipartForm, boundary_of

MAX_FILENAME = 255
LIFETIME_SECONDS = 30 * 24 * 3600
# OpenAI's range of ``expires_after``.
MIN_LIFETIME, MAX_LIFETIME = 3600, 2592000
PURPOSE = "batch"


async def store_upload(exchange: HttpExchange, files: FileStore, owner: str) -> StoredFile:
    """Store the file of a form. On ``ApiError`` or ``RequestError``, nothing is stored."""
    form = MultipartForm(boundary_of(exchange.header(b"content-type").decode("latin-1")))
    file_id = await files.begin()
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            await _store_pieces(exchange, files, file_id, form)
        seconds = _check_fields(form)
        return await files.finish(
            file_id,
            owner=owner,
            purpose=PURPOSE,
            filename=form.filename,
            expires_at=int(time.time()) + seconds,
        )
    except TimeoutError:
        await files.discard(file_id)
        message = f"The file did not arrive within {UPLOAD_SECONDS} s."
        raise ApiError(408, message, headers=CLOSE) from None
    except BaseException:
        await uninterrupted(files.discard(file_id))
        raise


async def _store_pieces(
    exchange: HttpExchange, files: FileStore, file_id: str, form: MultipartForm
) -> None:
    content, number = bytearray(), 0
    async for data in exchange.parts(files.limits.file_bytes + 2 * MAX_FIELD_BYTES):
        content += form.feed(data)
        if len(content) >= PIECE_BYTES:
            await files.append(file_id, number, bytes(content))
            content.clear()
            number += 1
    form.check_finished()
    if content:
        await files.append(file_id, number, bytes(content))


def _check_fields(form: MultipartForm) -> int:
    """Check the fields of a form. Returns the lifetime of its file in seconds."""
    if form.file_field != "file":
        message = "Missing required parameter: 'file'."
        raise invalid(message, "file", "missing_required_parameter")
    if "purpose" not in form.fields:
        message = "Missing required parameter: 'purpose'."
        raise invalid(message, "purpose", "missing_required_parameter")
    if form.fields["purpose"] != PURPOSE:
        purpose = form.fields["purpose"][:64]
        message = f"Invalid value for 'purpose': '{purpose}'; only '{PURPOSE}' is supported."
        raise invalid(message, "purpose", "invalid_value")
    name = form.filename
    if not 0 < len(name) <= MAX_FILENAME or name in (".", "..") or _is_path(name):
        raise invalid(
            f"Invalid file name: it must have 1 to {MAX_FILENAME} printable characters and no "
            "slashes.",
            "file",
        )
    return _lifetime(form.fields)


def _is_path(name: str) -> bool:
    return not name.isprintable() or "/" in name or "\\" in name


def _lifetime(fields: dict[str, str]) -> int:
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return LIFETIME_SECONDS
    if anchor != "created_at":
        raise invalid("'expires_after[anchor]' must be 'created_at'.", "expires_after")
    valid = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if seconds is None or not valid or not MIN_LIFETIME <= int(seconds) <= MAX_LIFETIME:
        message = (
            f"'expires_after[seconds]' must be a number from {MIN_LIFETIME} to {MAX_LIFETIME}."
        )
        raise invalid(message, "expires_after")
    return int(seconds)
