"""How parts of a cluster reach each other: the one place that opens channels and binds servers.

A ``Lock`` is what this process holds against strangers: a certificate with its key, the authority
that it trusts, and the cluster's tokens. Whatever of it was not configured is empty. What came from
files is read again when they change: servers take it for the next handshake and the next call, and
clients for the next channel.
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
from .reread import Reread

log = logging.getLogger("tandem.lock")

S = TypeVar("S")
Options = Sequence[tuple[str, Any]]

# Parts of a cluster call each other directly, whatever proxy the environment has for the world.
_DIRECTLY: Options = (("grpc.enable_http_proxy", 0),)
# Of one answer to a command; gRPC's own limit is a list of some ten thousand nodes.
_LARGE: Options = (("grpc.max_receive_message_length", 64 << 20),)

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
    lock: Lock,
    *args: Any,
    metadata: Iterable[tuple[str, str]] | None = None,
    **options: Any,
) -> Any:
    """The call with one more line of metadata than its caller gives it."""
    shown = (TOKEN_HEADER, TOKEN_PREFIX + lock.tokens[0])
    return call(*args, metadata=(*(metadata or ()), shown), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """PEM bytes and tokens; none of it shows in a log."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    tokens: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """``token`` is one that is in no file; ``files`` is the rest. ``name`` is the name in every
    certificate, if it is not the host's."""

    files: Reread[Papers] | None = field(default=None, repr=False)
    name: str = ""
    token: str = field(default="", repr=False)

    @property
    def papers(self) -> Papers:
        """As the files are now."""
        return self.files.value() if self.files is not None else Papers()

    @property
    def tokens(self) -> tuple[str, ...]:
        """All are accepted, and the first is shown to others; none when there is none."""
        return self.papers.tokens or ((self.token,) if self.token else ())

    @property
    def generation(self) -> int:
        """Another one since the files have changed: channels that last are opened anew."""
        if self.files is None:
            return 0
        self.files.value()
        return self.files.generation

    @property
    def encrypted(self) -> bool:
        """TLS is on, and with it CURVE: its keys need a control plane that can be trusted."""
        return bool(self.papers.certificate)

    @property
    def complete(self) -> bool:
        """Strangers can neither read nor join, so this process may listen for other machines."""
        return self.encrypted and bool(self.tokens)

    def expiries(self) -> dict[str, float]:
        """When the first certificate of each flag's file ends, as Unix time."""
        papers = self.papers
        files = {"--tls-cert": papers.certificate, "--tls-ca": papers.authority}
        return {flag: _expiry(pem) for flag, pem in files.items() if pem}

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """To the server at ``address``, host:port; the caller closes it."""
        options = (*_DIRECTLY, *options)
        if not self.encrypted:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._as_client(), options=self._named(options))

    def blocking_channel(self, address: str) -> grpc.Channel:
        """The same for programs without an event loop."""
        if not self.encrypted:
            return grpc.insecure_channel(address, options=(*_DIRECTLY, *_LARGE))
        return grpc.secure_channel(
            address, self._as_client(), options=self._named((*_DIRECTLY, *_LARGE))
        )

    def stub(self, kind: Callable[[Any], S], channel: grpc.aio.Channel | grpc.Channel) -> S:
        """A stub whose calls show the token.

        No interceptor: grpc.aio's would make a task and a generator of every stream of tokens.
        """
        made = kind(channel)
        if self.tokens:
            for name, call in vars(made).items():
                setattr(made, name, functools.partial(_showing, call, self))
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
        papers = self.papers
        if not papers.authority:
            return grpc.ssl_channel_credentials()
        return grpc.ssl_channel_credentials(papers.authority, papers.key, papers.certificate)

    def _as_server(self) -> grpc.ServerCredentials:
        """gRPC asks for the certificate at each handshake, in a thread of its own."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.papers),
            lambda: _configuration(self.papers),
            require_client_authentication=bool(self.papers.authority),
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
    token = config.cluster_token or ""
    if token:
        _check_token("--cluster-token", token)
    given = (config.tls_cert, config.tls_key, config.tls_ca, config.cluster_token_file)
    paths = [path for path in given if path is not None]
    files = Reread(paths, lambda: _read_papers(config)) if paths else None
    return Lock(files=files, name=config.tls_name or "", token=token)


def _read_papers(config: LockConfig) -> Papers:
    tokens = _tokens(config.cluster_token_file) if config.cluster_token_file is not None else ()
    if config.tls_cert is None or config.tls_key is None:
        return Papers(tokens=tokens)
    certificate = _pem("--tls-cert", config.tls_cert, "CERTIFICATE-----")
    key = _pem("--tls-key", config.tls_key, "PRIVATE KEY-----")
    _check_pair(config.tls_cert, config.tls_key)
    authority = b""
    if config.tls_ca is not None:
        authority = _pem("--tls-ca", config.tls_ca, "CERTIFICATE-----")
        _check_authority(config.tls_ca)
    return Papers(certificate=certificate, key=key, authority=authority, tokens=tokens)


def check_exposure(lock: Lock, insecure: bool, hosts: dict[str, str]) -> None:
    """Raise ``UsageError`` when a plane without a lock would be open to other machines unasked.

    ``hosts`` are flags and the addresses that they gave.
    """
    for flag, host in hosts.items():
        if is_loopback(host) or lock.complete:
            continue
        lacks = "a cluster token" if lock.encrypted else "TLS" if lock.tokens else "TLS and a token"
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


def _configuration(papers: Papers) -> grpc.ServerCertificateConfiguration:
    pair = (papers.key, papers.certificate)
    return grpc.ssl_server_certificate_configuration([pair], papers.authority or None)


def _expiry(pem: bytes) -> float:
    # Half a megabyte of library that only a scrape under TLS needs.
    from cryptography.x509 import load_pem_x509_certificates

    return min(one.not_valid_after_utc.timestamp() for one in load_pem_x509_certificates(pem))


def _tokens(path: str) -> tuple[str, ...]:
    flag = f"--cluster-token-file {path}"
    lines = [line.strip() for line in _read(flag, path).decode(errors="replace").splitlines()]
    tokens = tuple(line for line in lines if line)
    if not tokens:
        raise StartupError(f"{flag} is empty, which would let everybody in")
    for number, token in enumerate(tokens, 1):
        _check_token(flag if len(tokens) == 1 else f"{flag}, token {number},", token)
    return tokens


def _check_token(flag: str, token: str) -> None:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise StartupError(f"{flag} must be one word of printable ASCII; try: openssl rand -hex 32")


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
