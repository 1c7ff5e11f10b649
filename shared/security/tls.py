"""TLS of plain sockets, without gRPC."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import threading
from typing import Any

_READ_BYTES = 1 << 18


def server_context(certificate: bytes, key: bytes, authority: bytes) -> ssl.SSLContext:
    """The context of a server with these PEMs. With an authority, clients need its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, certificate, key)
    if authority:
        context.load_verify_locations(cadata=authority.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(certificate: bytes, key: bytes, authority: bytes) -> ssl.SSLContext:
    """The context of a client, which trusts the authority, or without one the public ones."""
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if authority:
        _load(context, certificate, key)
    return context


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-tls-") as folder:  # only its user may read it
        path = os.path.join(folder, "pair.pem")
        with open(path, "wb") as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(path)


class TlsStream:
    """The client's end of a TLS connection, on which one thread reads while another writes.

    ``ssl.SSLSocket`` would block the writer for as long as the reader waits.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str) -> None:
        """Shake hands with the server called ``name``. Raises ``OSError``."""
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._state = threading.Lock()  # of the three above; never held while waiting
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._fill()
        self._socket.sendall(self._outgoing.read())

    def sendall(self, data: bytes) -> None:
        """Like a socket's. Its callers take turns."""
        view = memoryview(data)
        with self._state:
            while view:
                view = view[self._tls.write(view) :]
            encrypted = self._outgoing.read()
        self._socket.sendall(encrypted)

    def recv_into(self, buffer: memoryview) -> int:
        """Like a socket's; 0 at the end."""
        while True:
            try:
                with self._state:
                    return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> None:
        """Wait for bytes from the other side."""
        data = self._socket.recv(_READ_BYTES)
        with self._state:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
