"""One HTTP/1.1 connection of the measuring client, parsed by httptools.

A general-purpose client spends more time on a token than a server does. Here each read from the
socket is parsed in place, with a timestamp taken before anything else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from httptools import HttpParserError, HttpResponseParser

OnBody = Callable[[bytes, float], None]


class ExchangeFailed(Exception):
    """The connection broke, or the response is not HTTP. ``untouched`` if no byte had arrived."""

    def __init__(self, message: str, *, untouched: bool = False) -> None:
        super().__init__(message)
        self.untouched = untouched


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time, and passes on the body of its response as it arrives."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.WriteTransport | None = None
        self._done: asyncio.Future[None] | None = None
        self._on_body: OnBody | None = None
        self._error: BaseException | None = None
        self._now = 0.0
        self._began = self._framed = False
        self.location = ""
        self.status = 0
        self.reusable = False

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and wait for the end of its response; returns the status."""
        assert self._transport is not None and self._done is None
        if self._transport.is_closing():
            raise ExchangeFailed("the connection is closed", untouched=True)
        self._on_body, self._began, self._framed, self.status = on_body, False, False, 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None
        return self.status

    def close(self) -> None:
        """Close at once; an exchange in progress fails."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- of the transport ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._began = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            # If a callback raised, its error is the cause.
            self._fail(error.__context__ or ExchangeFailed(f"not an HTTP response: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self.status and not self._framed and error is None:
            self._finish()  # a body without a length ends with the connection
        reason = "reset" if error else "closed"
        where = "in the middle of the response" if self._began else "before a response"
        failure = ExchangeFailed(
            f"the server {reason} the connection {where}", untouched=not self._began
        )
        self._fail(failure)

    # ---- of the parser -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._framed |= name in (b"content-length", b"transfer-encoding")
        if name == b"location":
            self.location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            try:
                self._on_body(body, self._now)
            except Exception as error:
                self._fail(error)
                raise

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    # ---- the end of an exchange ----------------------------------------------------------------

    def _finish(self) -> None:
        self._on_body = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._on_body = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
