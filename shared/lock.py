"""How parts of a cluster reach each other: the one place that opens channels and binds servers.

A ``Lock`` is what this process holds against strangers: a certificate with its key, the authority
that it trusts, and the cluster's token. Whatever of it was not configured is empty.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from .config import LockConfig
from .errors import StartupError, UsageError
from .meeting import UNIX

log = logging.getLogger("tandem.lock")

S = TypeVar("S")
Options = Sequence[tuple[str, Any]]

# Parts of a cluster call each other directly, whatever proxy the environment has for the world.
_DIRECTLY: Options = (("grpc.enable_http_proxy", 0),)

TOKEN_HEADER = "authorization"
TOKEN_PREFIX = "Bearer "

# What gRPC says when a handshake fails, and what that means to an operator.
_TROUBLES = (
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not by an authority of --tls-ca"),
    ("Hostname Verification Check failed", "its certificate has another name; see --tls-name"),
    ("WRONG_VERSION_NUMBER", "it does not use TLS, and this side does (--tls-cert)"),
)
# All that there is to see of a handshake that the other side has broken off.
_BROKEN_OFF = ("failed to connect", "Socket closed")


def _showing(
    call: Callable[..., Any],
    shown: tuple[str, str],
    *args: Any,
    metadata: Iterable[tuple[str, str]] | None = None,
    **options: Any,
) -> Any:
    """The call with one more line of metadata than its caller gives it."""
    return call(*args, metadata=(*(metadata or ()), shown), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """PEM bytes and the token; none of it shows in a log."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    name: str = ""
    token: str = field(default="", repr=False)

    @property
    def encrypted(self) -> bool:
        """TLS is on, and with it CURVE: its keys need a control plane that can be trusted."""
        return bool(self.certificate)

    @property
    def complete(self) -> bool:
        """Strangers can neither read nor join, so this process may listen for other machines."""
        return self.encrypted and bool(self.token)

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """To the server at ``address``, host:port; the caller closes it."""
        options = (*_DIRECTLY, *options)
        if not self.encrypted:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._as_client(), options=self._named(options))

    def blocking_channel(self, address: str) -> grpc.Channel:
        """The same for programs without an event loop."""
        if not self.encrypted:
            return grpc.insecure_channel(address, options=_DIRECTLY)
        return grpc.secure_channel(address, self._as_client(), options=self._named(_DIRECTLY))

    def stub(self, kind: Callable[[Any], S], channel: grpc.aio.Channel | grpc.Channel) -> S:
        """A stub whose calls show the token.

        No interceptor: grpc.aio's would make a task and a generator of every stream of tokens.
        """
        made = kind(channel)
        if self.token:
            shown = (TOKEN_HEADER, TOKEN_PREFIX + self.token)
            for name, call in vars(made).items():
                setattr(made, name, functools.partial(_showing, call, shown))
        return made

    def bind(self, server: grpc.aio.Server, host: str, port: int, what: str) -> int:
        """Have ``server`` listen; returns the port. Raises ``StartupError`` when it cannot."""
        address = _listening(host, port)
        try:
            if self.encrypted:
                bound = server.add_secure_port(address, self._as_server())
            else:
                bound = server.add_insecure_port(address)
        except RuntimeError:
            bound = 0
        if not bound:
            raise StartupError(
                f"cannot listen on {address} for {what}: the port is taken, or the address is not "
                f"this machine's; choose another port"
            )
        return bound

    def explain(self, error: grpc.RpcError) -> str:
        """What a failed call means, in words that say what to do about a lock that does not fit."""
        details = str(error.details() or error.code().name)
        for sign, meaning in _TROUBLES:
            if sign in details:
                return f"{meaning} ({details})"
        if not all(sign in details for sign in _BROKEN_OFF):
            return details
        if self.encrypted:
            return f"{details}; it may not trust this side's certificate (--tls-cert, --tls-ca)"
        return f"{details}; it may use TLS, which this side does not (--tls-cert)"

    def _as_client(self) -> grpc.ChannelCredentials:
        if not self.authority:
            return grpc.ssl_channel_credentials()
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def _as_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            self.authority or None,
            require_client_auth=bool(self.authority),
        )

    def _named(self, options: Options) -> Options:
        named = (("grpc.ssl_target_name_override", self.name),) if self.name else ()
        return (*options, *named)


# Neither TLS nor a token.
OPEN = Lock()


def open_url(url: str, seconds: float) -> Any:
    """A router's answer over HTTP, to be closed. Raises ``OSError``, of which an answer that is an
    error is an ``HTTPError``."""
    from urllib.request import ProxyHandler, build_opener

    return build_opener(ProxyHandler({})).open(url, timeout=seconds)


def read_lock(config: LockConfig) -> Lock:
    """The lock with its files read and checked.

    Raises ``StartupError`` for a file that is missing or is not what its flag says.
    """
    token = _token(config)
    if config.tls_cert is None or config.tls_key is None:
        return Lock(token=token)
    certificate = _pem("--tls-cert", config.tls_cert, "CERTIFICATE-----")
    key = _pem("--tls-key", config.tls_key, "PRIVATE KEY-----")
    _check_pair(config.tls_cert, config.tls_key)
    authority = b""
    if config.tls_ca is not None:
        authority = _pem("--tls-ca", config.tls_ca, "CERTIFICATE-----")
        _check_authority(config.tls_ca)
    return Lock(
        certificate=certificate,
        key=key,
        authority=authority,
        name=config.tls_name or "",
        token=token,
    )


def check_exposure(lock: Lock, insecure: bool, hosts: dict[str, str]) -> None:
    """Raise ``UsageError`` when a plane without a lock would be open to other machines unasked.

    ``hosts`` are flags and the addresses that they gave.
    """
    for flag, host in hosts.items():
        if is_loopback(host) or lock.complete:
            continue
        lacks = "a cluster token" if lock.encrypted else "TLS" if lock.token else "TLS and a token"
        if not insecure:
            raise UsageError(
                f"{flag} {host} is reachable from other machines, which needs TLS (--tls-cert, "
                f"--tls-key, --tls-ca) and a cluster token (--cluster-token-file); add --insecure "
                f"if the network is trusted"
            )
        log.warning("%s %s is open to other machines without %s (--insecure)", flag, host, lacks)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith(("127.", UNIX))


def _listening(host: str, port: int) -> str:
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _token(config: LockConfig) -> str:
    flag, token = "--cluster-token", config.cluster_token or ""
    if config.cluster_token_file is not None:
        flag = f"--cluster-token-file {config.cluster_token_file}"
        token = _read(flag, config.cluster_token_file).decode(errors="replace").strip()
        if not token:
            raise StartupError(f"{flag} is empty, which would let everybody in")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise StartupError(f"{flag} must be one word of printable ASCII; try: openssl rand -hex 32")
    return token


def _pem(flag: str, path: str, marker: str) -> bytes:
    content = _read(f"{flag} {path}", path)
    if marker.encode() not in content:
        raise StartupError(f"{flag} {path} is not PEM: it has no line that ends with {marker}")
    return content


def _read(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{what}: {error.strerror}") from None


def _check_pair(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password keeps OpenSSL from asking the terminal for one.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-cert {certificate} and --tls-key {key} are not a certificate and its "
            f"unencrypted key: {error.reason or error}"
        ) from None


def _check_authority(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-ca {path} has no certificate that can be read: {error.reason or error}"
        ) from None
