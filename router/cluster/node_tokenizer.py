"""The tokenizer of a model, fetched from a node unless this machine has it."""

from __future__ import annotations

from pathlib import Path

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import DecodeStub
from ...shared.errors import ModelError
from ...shared.models.fingerprint import text_fields
from ...shared.process.threads import in_thread
from ...shared.security.credentials import Credentials
from ...shared.telemetry.logs import logger
from ...shared.text.tokenizer_files import TokenizerFiles
from ...shared.text.tokenizer_message import MAX_BYTES, unpack_tokenizer
from ..node_streams.connection import CHANNEL_OPTIONS
from .groups import field_of
from .pinned_model import read_tokenizer

log = logger("router")

FETCH_SECONDS = 120.0


async def tokenizer_of(
    card: pb.ModelCard, address: str, credentials: Credentials
) -> TokenizerFiles:
    """The tokenizer of a node's model: from the model's folder if this machine has the same one
    there, otherwise from the node. Raises ``ModelError``."""
    try:
        files = await in_thread(lambda: read_tokenizer(Path(card.path)))
        local_problem = ""
        if problem := await in_thread(lambda: _mismatch(files, card)):
            local_problem = f"{files.origin} is on this machine, and of another model ({problem})"
    except ModelError as error:
        local_problem = str(error)
    if not local_problem:
        return files
    try:
        files = await _fetch(address, credentials)
    except _FetchError as error:
        raise ModelError(f"{local_problem}; fetching it from the node failed: {error}") from None
    if problem := await in_thread(lambda: _mismatch(files, card)):
        raise ModelError(f"the node sent another tokenizer than it announced ({problem})")
    log.info("the tokenizer of %s comes from the node at %s", card.name, address)
    return files


class _FetchError(Exception):
    """The node did not send a tokenizer."""


async def _fetch(address: str, credentials: Credentials) -> TokenizerFiles:
    parts: list[bytes] = []
    size = 0
    async with credentials.channel(address, CHANNEL_OPTIONS) as channel:
        stub = credentials.stub(DecodeStub, channel)
        try:
            rpc = stub.Tokenizer(pb.TokenizerRequest(), timeout=FETCH_SECONDS)
            async for part in rpc:
                parts.append(part.content)
                size += len(part.content)
                if size > MAX_BYTES:
                    rpc.cancel()
                    raise ModelError(f"the node's tokenizer is larger than {MAX_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            raise _FetchError(credentials.explain(error)) from None
    return await in_thread(lambda: unpack_tokenizer(b"".join(parts)))


def _mismatch(files: TokenizerFiles, card: pb.ModelCard) -> str:
    """The field in which a tokenizer differs from a card's; empty if it matches."""
    announced = {name: field_of(card, name) for name in ("vocabulary", "chat_template")}
    if not any(announced.values()):
        return ""  # a node whose model has no tokenizer
    own = text_fields(files)
    return next((name for name, value in announced.items() if value and own[name] != value), "")
