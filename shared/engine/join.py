"""How launchers and ranks on other hosts reach the head of their node.

A connection is TCP, with TLS if it is configured. Before any message is decoded, both sides prove
that they know the cluster token, without sending it::

    head    MAGIC, nonce
    joiner  nonce, HMAC(token, JOINER + both nonces)
    head    HMAC(token, HEAD + both nonces), or zeros

Then messages follow as on a local rank's channel (``channel.py``).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Iterable

from ..errors import StartupError
from ..host_port import join_host_port
from ..security.tls import TlsStream, client_context
from .channel import BlockingChannel, Stream
from .messages import JoinSecrets

MAGIC = b"tandem-join-1\r\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + _NONCE_BYTES
REPLY_BYTES = _NONCE_BYTES + _PROOF_BYTES
REFUSAL = bytes(_PROOF_BYTES)
# Time limit of a connection's handshake.
HANDSHAKE_SECONDS = 10.0
# A connection ends when the other side's kernel has not replied for this long. Ranks are pinged
# only once they have their cache, launchers never.
SILENCE_SECONDS = 10
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class UnreachableError(StartupError):
    """Nothing listens at the head's address yet, or it is the wrong one."""


def set_options(sock: socket.socket) -> None:
    """Send steps at once, and notice a silent death of the other side, on Linux within
    ``SILENCE_SECONDS``."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = _KEEPALIVE | {"TCP_USER_TIMEOUT": 1000 * SILENCE_SECONDS}
    for name, value in values.items():
        if (number := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)


def greeting() -> bytes:
    """The head's first bytes."""
    return MAGIC + secrets.token_bytes(_NONCE_BYTES)


def reply_to(token: str, greeting: bytes) -> bytes:
    """The joiner's reply."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _proof(token, b"joiner", greeting, nonce)


def admission(tokens: Iterable[str], greeting: bytes, reply: bytes) -> bytes:
    """The head's proof for a joiner that knows one of its tokens; else ``REFUSAL``."""
    nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    for token in tokens:
        if hmac.compare_digest(_proof(token, b"joiner", greeting, nonce), proof):
            return _proof(token, b"head", greeting, nonce)
    return REFUSAL


def _proof(token: str, side: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), b"tandem " + side + greeting + nonce, "sha256")


def connect(host: str, port: int, secrets: JoinSecrets) -> BlockingChannel:
    """An admitted connection to the head.

    Raises ``UnreachableError``, after which a later attempt may succeed, and ``StartupError`` if
    there is no head of the same cluster.
    """
    address = join_host_port(host, port)
    try:
        sock = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        raise UnreachableError(f"{address}: {error.strerror or error}") from None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sock.close)
        channel = _admitted(sock, host, address, secrets)
        on_failure.pop_all()
        return channel


def _admitted(
    sock: socket.socket, host: str, address: str, secrets: JoinSecrets
) -> BlockingChannel:
    """The connection after its handshake. Raises like ``connect``."""
    try:
        set_options(sock)
        stream = _encrypted(sock, host, secrets) if secrets.certificate else sock
        _present(stream, address, secrets.tokens[0])
        sock.settimeout(None)
        return BlockingChannel(stream)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        raise StartupError(
            f"no TLS with the head at {address}: {reason}; see --tls-cert, --tls-ca and --tls-name"
        ) from None
    except TimeoutError:
        raise StartupError(
            f"{address} accepts connections, but does not greet a host of a node: it is not the "
            f"head's --master-addr and --master-port, or only one side has --tls-cert"
        ) from None
    except OSError as error:
        raise UnreachableError(f"{address}: {error.strerror or error}") from None


def _encrypted(sock: socket.socket, host: str, secrets: JoinSecrets) -> TlsStream:
    context = client_context(secrets.certificate, secrets.key, secrets.authority)
    return TlsStream(sock, context, secrets.name or host)


def _present(stream: Stream, address: str, token: str) -> None:
    """The joiner's side of the handshake. Raises ``StartupError``, or ``OSError``."""
    challenge = _read(stream, GREETING_BYTES)
    if not challenge.startswith(MAGIC):
        raise StartupError(
            f"{address} is not the head of a node: another program listens there; see "
            f"--master-addr and --master-port"
        )
    mine = reply_to(token, challenge)
    stream.sendall(mine)
    proof = _read(stream, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"head", challenge, mine[:_NONCE_BYTES])):
        raise StartupError(f"the head at {address} has another cluster token than this host")


def _read(stream: Stream, count: int) -> bytes:
    """Bytes from the head. Raises ``OSError``."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        size = stream.recv_into(view[done:])
        if not size:
            raise ConnectionResetError("it closed the connection")
        done += size
    return bytes(data)
