"""uvicorn's HTTP protocol with limits on the size and time of headers.

Requests that are rejected before their head is complete get an error body too. Upgrade headers,
which Java's HTTP client sends with every request, are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import ApiError
from ..options import RouterOptions
from .access_log import AccessRecord
from .encoding import dump

# How long a client may continue to send after the response.
LINGER_SECONDS = 2.0
# Read at once. uvicorn calls back for each chunk of a body and for each pipelined request, which
# may have only a few bytes: asyncio's default of 256 KiB could block the loop for 60 ms.
READ_BYTES = 32 * 1024


class _Lingering:
    """A transport that can be closed while the client still sends.

    The kernel resets a connection that is closed with unread input, and most clients then lose a
    response in flight. So only our side is closed, and input is discarded for a while.
    """

    def __init__(self, transport: Any, loop: Any, unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._loop = loop
        self._unread = unread
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write, unless our side is closed; the task of a request may still try to."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing() or not self._unread():
            self._transport.close()
            return
        self._timer = self._loop.call_later(LINGER_SECONDS, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``bounded_protocol`` sets the attributes of the class."""

    options: RouterOptions
    error_body: Callable[[ApiError], Any]
    count_error: Callable[[int], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_open = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._served: Any = None  # the current cycle; ``self.cycle`` is the last pipelined one

    def connection_made(self, transport: Any) -> None:
        transport.max_size = READ_BYTES
        super().connection_made(transport)
        self.transport = _Lingering(transport, self.loop, self._unread)  # type: ignore[assignment]
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if isinstance(self.transport, _Lingering):
            self.transport.lost()
        served = self._served
        if served is not None and served is not self.cycle and not served.response_complete:
            # uvicorn notifies only the last of several pipelined requests.
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        self._parse(data)
        # The parser buffers an unfinished header, so received bytes are counted as well.
        if self._head_open and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.options.max_header_bytes:
                self._refuse(self._too_large())
        elif self._between_requests:
            # uvicorn treats any byte as a request, and cancels the keep-alive timeout.
            self._arm()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    (end_of_head,) = upgrade.args
                    data = self._head_without_upgrade() + data[end_of_head:]
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _head_without_upgrade(self) -> bytes:
        """The head that has just been parsed, without its upgrade header, for a new parser.

        The parser treats everything after an upgrade as another protocol, so it drops the body. A
        server may ignore an upgrade, but not the body: RFC 9110, 7.8.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _new_parser(self)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort
        self._head_bytes = 0
        self._head_open = True
        self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refusal = ApiError(405, "CONNECT is not allowed.")
                raise httptools.HttpParserError("a proxy's method")
            return  # the head is parsed again without the upgrade
        self._head_open = False
        self._head_bytes = 0
        self._disarm()
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # uvicorn pauses reading until this request's turn, and would not notice a disconnect.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Reject a request that could not be parsed, with ``_refusal`` or as invalid HTTP."""
        self._refuse(self._refusal or ApiError(400, msg))

    @property
    def _between_requests(self) -> bool:
        """True between two requests. Input is then the rest of an unread body, or empty lines."""
        return self.cycle is not None and self.cycle.response_complete

    @property
    def _can_respond(self) -> bool:
        """True if an error can be written now. While an earlier request is served, the client would
        take it for that request's response, or as a part of its stream."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _unread(self) -> bool:
        """True if the client still sends a request after its response."""
        in_body = self.cycle is not None and self.cycle.more_body
        return in_body or (self._head_open and self._head_bytes > 0)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.options.max_header_bytes:
            self._refusal = self._too_large()
            raise httptools.HttpParserError("the head is too large")

    def _too_large(self) -> ApiError:
        limit = self.options.max_header_bytes
        return ApiError(431, f"The request line and headers are over the limit of {limit} bytes.")

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.options.header_timeout, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        if not self._head_open or not self._head_bytes:
            self.transport.close()  # there is no request to respond to
            return
        limit = self.options.header_timeout
        self._refuse(ApiError(408, f"The headers did not arrive within {limit:g} s."))

    def _refuse(self, error: ApiError) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        if not self._can_respond:
            self.transport.close()
            return
        if self.options.access_log:  # method and path may be unknown
            AccessRecord("-", "-", status=error.status, error=error.code or error.kind).log()
        type(self).count_error(error.status)
        body = dump(type(self).error_body(error))
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[error.status], len(body), body)
        )
        self.transport.close()


def _new_parser(protocol: BoundedProtocol) -> Any:
    """A parser configured like uvicorn's."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def bounded_protocol(
    options: RouterOptions,
    error_body: Callable[[ApiError], Any],
    count_error: Callable[[int], None],
) -> type[BoundedProtocol]:
    """A protocol class with these options, which uvicorn instantiates."""
    attributes = {
        "options": options,
        "error_body": staticmethod(error_body),
        "count_error": staticmethod(count_error),
    }
    return type("RouterProtocol", (BoundedProtocol,), attributes)
