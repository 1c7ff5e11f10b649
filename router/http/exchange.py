"""One HTTP exchange over ASGI, with limits on the size and time of the body and of writes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from ...shared.errors import OverloadedError
from ...shared.telemetry.logs import checked_request_id
from ..errors import ApiError, to_api_error
from ..options import RouterOptions
from .access_log import AccessRecord
from .encoding import dump
from .memory_budget import MemoryShare

Headers = Iterable[tuple[bytes, bytes]]
JSON_TYPE = b"application/json"
CLOSE = ((b"connection", b"close"),)
MAX_SHOWN = 64  # characters of a header in an error
# Bytes of a response that are written at once.
WRITE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of one or several API keys. A limit of ``None`` is the router's."""

    name: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


# Every client of a router without keys.
ANYBODY = KeyOwner("")


class ClientGoneError(Exception):
    """The client has disconnected, or has stopped reading."""


class HttpExchange:
    """A request and its response.

    ``started``: the status has been sent. ``complete``: the whole response has been sent.
    ``streaming``: the response is a stream. ``closes``: close the connection after the response.
    ``id_header``: an API's own header for the request id, beside ``x-request-id``.
    ``stream_type``: content type of a stream. ``any_type``: accept a body of any content type,
    except from browsers, where any page could send it.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, options: RouterOptions) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._options = options
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        address = scope.get("client") or ("",)
        # The parser pools take turns by client; behind a proxy, only keys tell clients apart.
        keys = self.header(b"authorization"), self.header(b"x-api-key")
        self.client: Hashable = (address[0], keys)
        client_id = checked_request_id(self.header(b"x-request-id").decode("latin-1"))
        self.request_id = client_id or uuid.uuid4().hex
        self.access = AccessRecord(self.method, self.path)
        self.owner = ANYBODY
        self.headers: list[tuple[bytes, bytes]] = []  # for the response, also of an error
        self.started = False
        self.complete = False
        self.streaming = False
        self.writes = 0  # so far
        self.closes = False
        self.id_header: bytes | None = None
        self.any_type = False
        self.stream_type = b"text/event-stream; charset=utf-8"
        self._writing_since: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._aborted = False

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self._scope["headers"] if key == name), b"")

    @property
    def has_body(self) -> bool:
        """True if the headers announce a body."""
        return self.header(b"content-length") not in (b"", b"0") or bool(
            self.header(b"transfer-encoding")
        )

    @property
    def writing(self) -> bool:
        """True while a write is in progress."""
        return self._writing_since is not None

    def set_owner(self, owner: KeyOwner) -> None:
        """Attribute the request to the owner of its key."""
        self.owner = owner
        self.access.key = owner.name

    async def body(self, share: MemoryShare) -> bytearray:
        """Read the body within the limits on type, size and time; account for it in ``share``."""
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind != JSON_TYPE and not (self.any_type and not self.header(b"origin")):
            raise ApiError(415, "The content type must be 'application/json'.", headers=CLOSE)
        self._check_encoding()
        limit = self._options.max_body_bytes
        length = self.header(b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise self._too_large(limit)
        try:
            async with asyncio.timeout(self._options.body_timeout):
                return await self._read(limit, share)
        except TimeoutError:
            message = f"The body did not arrive within {self._options.body_timeout:g} s."
            raise ApiError(408, message, headers=CLOSE) from None
        except OverloadedError as error:
            overloaded = to_api_error(error, retry_after=self._options.retry_after)
            assert overloaded is not None
            overloaded.headers += CLOSE  # the rest of the body is not read
            raise overloaded from None

    async def _read(self, limit: int, share: MemoryShare) -> bytearray:
        body = bytearray()
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGoneError
            part = event.get("body", b"")
            share.take(len(part))
            body += part
            if len(body) > limit:
                raise self._too_large(limit)
            if not event.get("more_body"):
                return body

    def _too_large(self, limit: int) -> ApiError:
        return ApiError(413, f"The body is over the limit of {limit} bytes.", headers=CLOSE)

    def _check_encoding(self) -> None:
        """Reject compressed content and transfer encodings: RFC 9110, 15.5.16, and RFC 9112,
        6.1."""
        coding = self.header(b"transfer-encoding").strip().lower()
        if coding not in (b"", b"chunked"):
            name = coding.decode("latin-1")[:MAX_SHOWN]
            message = f"The transfer encoding {name!r} is not supported; only 'chunked' is."
            raise ApiError(501, message, headers=CLOSE)
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity"):
            name = encoding.decode("latin-1")[:MAX_SHOWN]
            message = f"The content encoding {name!r} is not supported; send the body without it."
            raise ApiError(415, message, headers=(*CLOSE, (b"accept-encoding", b"identity")))

    async def parts(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives: at most ``limit`` bytes, with at most ``body_timeout``
        between two parts."""
        self._check_encoding()
        length = self.header(b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise self._too_large(limit)
        more, size = True, 0
        while more:
            try:
                async with asyncio.timeout(self._options.body_timeout):
                    event = await self._receive()
            except TimeoutError:
                message = f"No part of the body arrived for {self._options.body_timeout:g} s."
                raise ApiError(408, message, headers=CLOSE) from None
            if event["type"] == "http.disconnect":
                raise ClientGoneError
            part, more = event.get("body", b""), event.get("more_body", False)
            size += len(part)
            if size > limit:
                raise self._too_large(limit)
            yield part

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects. Call only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Any) -> None:
        """Send an ASGI message, for responses that are not written by the methods below."""
        if message["type"] == "http.response.start":
            await self._start(message["status"], message["headers"])
        else:
            await self._write(message.get("body", b""), more=message.get("more_body", False))

    async def respond_json(self, status: int, value: Any, headers: Headers = ()) -> None:
        """Send a whole JSON response."""
        await self.respond(status, dump(value), JSON_TYPE, headers)

    async def respond(self, status: int, body: bytes, kind: bytes, headers: Headers = ()) -> None:
        """Send a whole response."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        await self._write(body, more=False)

    async def start_stream(self) -> None:
        """Send the head of a stream."""
        self.streaming = True
        headers = [
            (b"content-type", self.stream_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._start(200, headers)

    async def write(self, events: bytes) -> None:
        """Send events of a stream; no-op if empty."""
        if events:
            await self._write(events, more=True)

    async def end_stream(self, events: bytes = b"") -> None:
        """Send the last events, and end the stream."""
        await self._write(events, more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.access.status = status
        if self.closes and CLOSE[0] not in headers:
            headers = [*headers, *CLOSE]
        headers = [*headers, *self.headers, (b"x-request-id", self.request_id.encode())]
        if self.id_header is not None:
            headers.append((self.id_header, self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Write, and wait for a slow client. The connection is aborted if ``WRITE_BYTES`` take
        longer than ``send_timeout``."""
        if len(data) > WRITE_BYTES:
            for start in range(0, len(data), WRITE_BYTES):
                end = start + WRITE_BYTES
                await self._write(data[start:end], more=more or end < len(data))
            return
        self.writes += 1
        self._writing_since = time.monotonic()
        if self._watch is None:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(self._options.send_timeout, self._check_write)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._writing_since = None
        if self._aborted:
            raise ClientGoneError
        self.complete = not more

    def _check_write(self) -> None:
        """Abort the connection if the current write takes too long. One timer serves all writes,
        because a stream has thousands of them."""
        loop, limit = asyncio.get_running_loop(), self._options.send_timeout
        since = self._writing_since
        waited = 0.0 if since is None else time.monotonic() - since
        if waited < limit:
            self._watch = loop.call_later(limit - waited, self._check_write)
            return
        self._aborted = True
        self._scope["state"]["abort"]()

    def close(self) -> None:
        """Cancel the write timer. Nothing may be written after this."""
        if self._watch is not None:
            self._watch.cancel()
