"""One HTTP exchange on bare ASGI: bounded reading, watched writing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ...shared.errors import OverloadedError
from ...shared.telemetry.logs import checked_request_id
from ..errors import ApiError, to_api_error
from ..options import RouterOptions
from .access_log import Access
from .encoding import dump
from .held_bytes import Share

Headers = Iterable[tuple[bytes, bytes]]
JSON_TYPE = b"application/json"
CLOSE = ((b"connection", b"close"),)


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class Exchange:
    """A request and its answer. ``started`` says whether the status has been sent."""

    def __init__(self, scope: Any, receive: Any, send: Any, options: RouterOptions) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._options = options
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        address = scope.get("client") or ("",)
        # Whose turn it is where requests wait for each other; behind a proxy, keys tell them apart.
        self.client: Hashable = (address[0], self.header(b"authorization"))
        given = checked_request_id(self.header(b"x-request-id").decode("latin-1"))
        self.request_id = given or uuid.uuid4().hex
        self.access = Access(self.method, self.path)
        self.started = False
        self.closes = False  # the connection ends with this answer
        self.streaming = False
        self._writing_since: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._cut = False

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self._scope["headers"] if key == name), b"")

    async def body(self, share: Share) -> bytes:
        """The whole body, within its limits of type, size and time, counted in ``share``."""
        if self.header(b"content-type").partition(b";")[0].strip().lower() != JSON_TYPE:
            raise ApiError(415, "The content type must be 'application/json'.", headers=CLOSE)
        limit = self._options.max_body_bytes
        length = self.header(b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise self._too_large()
        try:
            async with asyncio.timeout(self._options.body_timeout):
                return await self._read(limit, share)
        except TimeoutError:
            message = f"The body did not arrive within {self._options.body_timeout:g} s."
            raise ApiError(408, message, headers=CLOSE) from None
        except OverloadedError as error:
            told = to_api_error(error, retry_after=self._options.retry_after)
            assert told is not None
            told.headers += CLOSE  # the rest of the body is not read
            raise told from None

    async def _read(self, limit: int, share: Share) -> bytes:
        parts = bytearray()
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGoneError
            part = event.get("body", b"")
            share.take(len(part))
            parts += part
            if len(parts) > limit:
                raise self._too_large()
            if not event.get("more_body"):
                return bytes(parts)

    def _too_large(self) -> ApiError:
        limit = self._options.max_body_bytes
        return ApiError(413, f"The body is over the limit of {limit} bytes.", headers=CLOSE)

    async def disconnected(self) -> None:
        """Returns when the client has gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def json(self, status: int, value: Any, headers: Headers = ()) -> None:
        await self.answer(status, dump(value), JSON_TYPE, headers)

    async def answer(self, status: int, body: bytes, kind: bytes, headers: Headers = ()) -> None:
        """A whole answer."""
        await self.answer_in_pieces(status, [body], kind, headers)

    async def answer_in_pieces(
        self, status: int, pieces: Sequence[bytes], kind: bytes, headers: Headers = ()
    ) -> None:
        """A whole answer that is written piece by piece, as fast as the client reads."""
        length = (b"content-length", str(sum(map(len, pieces))).encode())
        await self._start(status, [(b"content-type", kind), length, *headers])
        for piece in pieces[:-1]:
            await self._write(piece, more=True)
        await self._write(pieces[-1], more=False)

    async def start_events(self) -> None:
        """The head of a stream of server-sent events."""
        self.streaming = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._start(200, headers)

    async def events(self, values: Iterable[Any]) -> None:
        """Several events in one write."""
        data = b"".join(b"data: " + dump(value) + b"\n\n" for value in values)
        if data:
            await self._write(data, more=True)

    async def end_events(self, *, done: bool) -> None:
        await self._write(b"data: [DONE]\n\n" if done else b"", more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        self.access.status = status
        if self.closes and CLOSE[0] not in headers:
            headers = [*headers, *CLOSE]
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Waits while the client is slow, but not for ever: then the connection is cut."""
        loop = asyncio.get_running_loop()
        self._writing_since = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._options.send_timeout, self._look)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._writing_since = None
        if self._cut:
            raise ClientGoneError

    def _look(self) -> None:
        """Whether a write takes too long. One timer watches all of them: a stream has thousands."""
        loop, limit = asyncio.get_running_loop(), self._options.send_timeout
        waited = 0.0 if self._writing_since is None else loop.time() - self._writing_since
        if waited < limit:
            self._watch = loop.call_later(limit - waited, self._look)
            return
        self._cut = True
        self._scope["state"]["abort"]()

    def close(self) -> None:
        """Nothing is written any more."""
        if self._watch is not None:
            self._watch.cancel()
