"""Credentials of a cluster: the only module that opens channels and binds servers.

``Credentials`` hold a certificate with its key, the authority that this process trusts, and the
cluster's tokens; each is empty unless configured. Files are read again when they change: servers
use the new content for the next handshake and the next RPC, clients for the next channel.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import grpc

from ..config import SecurityConfig
from ..errors import StartupError, UsageError
from ..host_port import is_loopback, join_host_port
from ..unix_sockets import UNIX
from .watched_files import WatchedFiles

log = logging.getLogger("tandem.security")

S = TypeVar("S")
Options = Sequence[tuple[str, Any]]

# Parts of a cluster connect directly, even if the environment sets a proxy.
_DIRECTLY: Options = (("grpc.enable_http_proxy", 0),)
# Options of a long-lived channel. Its connection may die, or be dropped by a firewall or NAT,
# without notice to either side, and its host name may get another address.
LASTING: Options = (
    # RPCs fail within 3 s of a silent death, even if the connection was idle; pings detect it, and
    # keep the others alive in firewalls and NATs.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise gRPC waits a minute for the reply to a ping, whatever keepalive_timeout_ms says.
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that returns after an hour is reached at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Otherwise channels to one address share a connection, even if one is opened because the
    # other's has died.
    ("grpc.use_local_subchannel_pool", 1),
    # Otherwise gRPC resolves a name at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
# Options of a server whose clients have such channels; otherwise gRPC ends their connections as
# abuse.
PINGED: Options = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
)
# For replies to commands; gRPC's default only fits a list of some ten thousand nodes.
_LARGE: Options = (("grpc.max_receive_message_length", 64 << 20),)
# An accepted connection without a handshake is closed after this; gRPC's default is two minutes.
HANDSHAKE_SECONDS = 10

TOKEN_HEADER = "authorization"
TOKEN_PREFIX = "Bearer "

# Messages of gRPC about a failed handshake, with explanations for operators.
_EXPLANATIONS = (
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not by an authority of --tls-ca"),
    ("Hostname Verification Check failed", "its certificate has another name; see --tls-name"),
    ("WRONG_VERSION_NUMBER", "it does not use TLS, and this side does (--tls-cert)"),
)
# Parts of gRPC's message if the other side has aborted the handshake.
_ABORTED = ("failed to connect", "Socket closed")


def connection_limits(max_connections: int) -> tuple[tuple[str, int], ...]:
    """Options of a server that closes connections beyond ``max_connections`` at once.

    An idle connection takes some 12 KiB of memory and a descriptor.
    """
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
    )


def _with_token(
    rpc: Callable[..., Any],
    credentials: Credentials,
    *args: Any,
    metadata: Iterable[tuple[str, str]] | None = None,
    **options: Any,
) -> Any:
    """Start the RPC with the token added to its metadata."""
    token = (TOKEN_HEADER, TOKEN_PREFIX + credentials.tokens[0])
    return rpc(*args, metadata=(*(metadata or ()), token), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFiles:
    """PEM bytes and tokens, kept out of logs and reprs."""

    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    authority: bytes = field(default=b"", repr=False)
    tokens: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials from ``files``, or a ``token`` that was configured directly. ``name`` is the
    name in every certificate, if it is not the host's."""

    files: WatchedFiles[CredentialFiles] | None = field(default=None, repr=False)
    name: str = ""
    token: str = field(default="", repr=False)

    @property
    def current(self) -> CredentialFiles:
        """The current content of the files."""
        return self.files.value() if self.files is not None else CredentialFiles()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The accepted tokens, the first of which is sent to others. Empty without a token."""
        return self.current.tokens or ((self.token,) if self.token else ())

    @property
    def generation(self) -> int:
        """A number that changes with the files; long-lived channels are then opened again."""
        if self.files is None:
            return 0
        self.files.value()
        return self.files.generation

    @property
    def encrypted(self) -> bool:
        """True with TLS, which CURVE needs too: its keys travel over the control plane."""
        return bool(self.current.certificate)

    @property
    def complete(self) -> bool:
        """True if strangers can neither read nor join, so that other machines may connect."""
        return self.encrypted and bool(self.tokens)

    def expiries(self) -> dict[str, float]:
        """Expiry of the first certificate to expire in each flag's file, as Unix time."""
        certificates = {
            "--tls-cert": self.current.certificate,
            "--tls-ca": self.current.authority,
        }
        return {flag: _expiry(pem) for flag, pem in certificates.items() if pem}

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel to the server at ``address`` (host:port); the caller closes it."""
        options = (*_DIRECTLY, *options)
        if not self.encrypted:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._as_client(), options=self._named(options))

    def blocking_channel(self, address: str) -> grpc.Channel:
        """Like ``channel``, for programs without an event loop."""
        if not self.encrypted:
            return grpc.insecure_channel(address, options=(*_DIRECTLY, *_LARGE))
        return grpc.secure_channel(
            address, self._as_client(), options=self._named((*_DIRECTLY, *_LARGE))
        )

    @overload
    def stub(self, kind: Callable[[grpc.aio.Channel], S], channel: grpc.aio.Channel) -> S: ...

    @overload
    def stub(self, kind: Callable[[grpc.Channel], S], channel: grpc.Channel) -> S: ...

    def stub(self, kind: Callable[[Any], S], channel: grpc.aio.Channel | grpc.Channel) -> S:
        """A stub whose RPCs carry the token.

        An interceptor of grpc.aio would add a task and a generator to every stream of tokens.
        """
        stub = kind(channel)
        if self.tokens:
            for name, rpc in vars(stub).items():
                setattr(stub, name, functools.partial(_with_token, rpc, self))
        return stub

    def bind(self, server: grpc.aio.Server, host: str, port: int, what: str) -> int:
        """Bind ``server`` and return the port. Raises ``StartupError``."""
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
        """The meaning of a failed RPC, with a remedy if the two sides' credentials do not
        match."""
        details = str(error.details() or error.code().name)
        for part, explanation in _EXPLANATIONS:
            if part in details:
                return f"{explanation} ({details})"
        if not all(part in details for part in _ABORTED):
            return details
        if self.encrypted:
            return f"{details}; it may not trust this side's certificate (--tls-cert, --tls-ca)"
        return f"{details}; it may use TLS, which this side does not (--tls-cert)"

    def _as_client(self) -> grpc.ChannelCredentials:
        files = self.current
        if not files.authority:
            return grpc.ssl_channel_credentials()
        return grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)

    def _as_server(self) -> grpc.ServerCredentials:
        """Credentials whose changes gRPC asks for at each handshake, in its own threads.

        What it gets replaces what it has, which it frees although another handshake may be about
        to use it (https://github.com/grpc/grpc/issues/36693). Hence ``None`` unless files changed.
        """
        used = self.current

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            files = self.current
            if files == used:
                return None
            used = files
            return _configuration(files)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(used),
            renewed,  # type: ignore[arg-type] # grpc-stubs omits that None is "no change"
            require_client_authentication=bool(used.authority),
        )

    def _named(self, options: Options) -> Options:
        named = (("grpc.ssl_target_name_override", self.name),) if self.name else ()
        return (*options, *named)


# Neither TLS nor a token.
INSECURE = Credentials()


def open_url(url: str, seconds: float) -> Any:
    """Request a URL of a router, without a proxy; the caller closes the response.

    Raises ``OSError``, which for an error status is an ``HTTPError``."""
    from urllib.request import ProxyHandler, build_opener

    return build_opener(ProxyHandler({})).open(url, timeout=seconds)


def read_credentials(config: SecurityConfig) -> Credentials:
    """Read and check the files of the configured credentials.

    Raises ``StartupError`` for a file that is missing or of the wrong kind.
    """
    token = config.cluster_token or ""
    if token:
        _check_token("--cluster-token", token)
    options = (config.tls_cert, config.tls_key, config.tls_ca, config.cluster_token_file)
    paths = [path for path in options if path is not None]
    files = WatchedFiles(paths, lambda: _read_files(config)) if paths else None
    return Credentials(files=files, name=config.tls_name or "", token=token)


def _read_files(config: SecurityConfig) -> CredentialFiles:
    tokens = _tokens(config.cluster_token_file) if config.cluster_token_file is not None else ()
    if config.tls_cert is None or config.tls_key is None:
        return CredentialFiles(tokens=tokens)
    certificate = _pem("--tls-cert", config.tls_cert, "CERTIFICATE-----")
    key = _pem("--tls-key", config.tls_key, "PRIVATE KEY-----")
    _check_pair(config.tls_cert, config.tls_key)
    authority = b""
    if config.tls_ca is not None:
        authority = _pem("--tls-ca", config.tls_ca, "CERTIFICATE-----")
        _check_authority(config.tls_ca)
    return CredentialFiles(certificate=certificate, key=key, authority=authority, tokens=tokens)


def check_exposure(credentials: Credentials, insecure: bool, hosts: dict[str, str]) -> None:
    """Raise ``UsageError`` if a plane without credentials would listen for other machines, unless
    ``insecure``.

    ``hosts`` maps flags to their addresses.
    """
    for flag, host in hosts.items():
        if is_loopback(host) or credentials.complete:
            continue
        missing = (
            "a cluster token"
            if credentials.encrypted
            else "TLS"
            if credentials.tokens
            else "TLS and a token"
        )
        if not insecure:
            raise UsageError(
                f"{flag} {host} is reachable from other machines, which needs TLS (--tls-cert, "
                f"--tls-key, --tls-ca) and a cluster token (--cluster-token-file); add --insecure "
                f"if the network is trusted"
            )
        log.warning("%s %s is open to other machines without %s (--insecure)", flag, host, missing)


def _listening(host: str, port: int) -> str:
    return host if host.startswith(UNIX) else join_host_port(host, port)


def _configuration(files: CredentialFiles) -> grpc.ServerCertificateConfiguration:
    pair = (files.key, files.certificate)
    return grpc.ssl_server_certificate_configuration([pair], files.authority or None)


def _expiry(pem: bytes) -> float:
    # Imported late: half a megabyte that only a scrape under TLS needs.
    from cryptography.x509 import load_pem_x509_certificates

    return min(one.not_valid_after_utc.timestamp() for one in load_pem_x509_certificates(pem))


def _tokens(path: str) -> tuple[str, ...]:
    flag = f"--cluster-token-file {path}"
    lines = [line.strip() for line in _read(flag, path).decode(errors="replace").splitlines()]
    tokens = tuple(line for line in lines if line)
    if not tokens:
        raise StartupError(f"{flag} is empty, which would admit everybody")
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
        # Without a password, OpenSSL would prompt for one.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # from OpenSSL, or the file was removed in the meantime
        raise StartupError(
            f"--tls-cert {certificate} and --tls-key {key} are not a certificate and its "
            f"unencrypted key: {_reason(error)}"
        ) from None


def _check_authority(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # from OpenSSL, or the file was removed in the meantime
        raise StartupError(
            f"--tls-ca {path} has no certificate that can be read: {_reason(error)}"
        ) from None


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)
