"""Incomplete credentials are refused at start; complete ones admit members and give strangers a
reason."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.proto.tandem_pb2_grpc import (
    RegistryServicer,
    RegistryStub,
    add_RegistryServicer_to_server,
)
from tandem.router.cluster import admin
from tandem.shared.config import SecurityConfig
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.security.credentials import (
    Credentials,
    check_exposure,
    open_url,
    read_credentials,
)
from tandem.shared.security.token_interceptor import TokenInterceptor
from tandem.tests.support.certificates import Papers, issue

TOKEN = "a-token-of-the-cluster"


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return issue(tmp_path_factory.mktemp("papers"), "127.0.0.1")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Credentials of another authority, for the same host."""
    return issue(tmp_path_factory.mktemp("strange"), "127.0.0.1")


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tls_cert": "c"}, "--tls-cert needs --tls-key"),
        ({"tls_key": "k"}, "--tls-key needs --tls-cert"),
        ({"tls_ca": "ca.pem"}, "--tls-ca ca.pem needs --tls-cert and --tls-key"),
        ({"tls_name": "n"}, "--tls-name n needs --tls-cert"),
        ({"cluster_token": "t", "cluster_token_file": "f"}, "give one of them"),
        ({"cluster_token": ""}, "--cluster-token is empty"),
    ],
)
def test_half_a_lock_is_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SecurityConfig(**fields)


@pytest.mark.parametrize("flag", ["tls_cert", "tls_key", "tls_ca", "cluster_token_file"])
def test_a_file_that_cannot_be_read_is_named(papers: Papers, tmp_path: Path, flag: str) -> None:
    name = "--" + flag.replace("_", "-")
    missing, empty = tmp_path / "none", tmp_path / "empty"
    empty.touch()
    with pytest.raises(StartupError, match=f"{name} {missing}: No such file"):
        read_credentials(papers.config(**{flag: str(missing)}))
    with pytest.raises(StartupError, match=f"{name} {empty} is (not PEM|empty)"):
        read_credentials(papers.config(**{flag: str(empty)}))


def test_a_key_of_another_certificate_is_refused(papers: Papers, strange: Papers) -> None:
    with pytest.raises(StartupError, match="are not a certificate and its unencrypted key: KEY_VA"):
        read_credentials(papers.config(tls_key=str(strange.key)))


def test_a_broken_certificate_is_refused(papers: Papers, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(StartupError, match=r"--tls-cert .*broken.pem and --tls-key"):
        read_credentials(papers.config(tls_cert=str(broken)))
    with pytest.raises(StartupError, match=r"--tls-ca .*broken.pem has no certificate"):
        read_credentials(papers.config(tls_ca=str(broken)))


@pytest.mark.parametrize("token", ["two words", "nöt", "a\nb"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(StartupError, match="--cluster-token must be one word"):
        read_credentials(SecurityConfig(cluster_token=token))


def test_a_token_file_may_end_with_a_newline_and_no_secret_shows(
    papers: Papers, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    credentials = read_credentials(papers.config(cluster_token_file=str(file)))
    assert credentials.tokens == (TOKEN,) and credentials.complete
    assert TOKEN not in repr(credentials) and "PRIVATE" not in repr(credentials)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_lock(host: str) -> None:
    check_exposure(Credentials(), False, {"--host": host})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-3"])
def test_other_machines_are_let_in_only_with_a_lock_or_on_request(
    host: str, papers: Papers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    from_file = read_credentials(SecurityConfig(cluster_token_file=str(file)))
    halves = [Credentials(), Credentials(token=TOKEN), from_file, read_credentials(papers.config())]
    lacking = ["TLS and a token", "TLS", "TLS", "a cluster token"]
    for half, lacks in zip(halves, lacking, strict=True):
        with pytest.raises(UsageError, match=f"--kv-host {host} is reachable.*--insecure"):
            check_exposure(half, False, {"--host": "127.0.0.1", "--kv-host": host})
        caplog.clear()
        check_exposure(half, True, {"--host": host})
        assert f"--host {host} is open to other machines without {lacks} (" in caplog.text
    caplog.clear()
    check_exposure(read_credentials(papers.config(cluster_token=TOKEN)), False, {"--host": host})
    assert not caplog.text


# ---- channels ------------------------------------------------------------------------------------


class ListingRegistry(RegistryServicer):
    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        return pb.ListReply(nodes=[pb.NodeInfo(node_id="n")])


@asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[tuple[str, TokenInterceptor]]:
    gate = TokenInterceptor(credentials, "refused")
    server = grpc.aio.server(interceptors=(gate,))
    add_RegistryServicer_to_server(ListingRegistry(), server)
    port = credentials.bind(server, "127.0.0.1", 0, "a test")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", gate
    finally:
        await server.stop(grace=None)


async def ask(credentials: Credentials, address: str) -> str:
    """The name of the only node, or the status and details of the refusal."""
    async with credentials.channel(address) as channel:
        try:
            reply = await credentials.stub(RegistryStub, channel).List(pb.ListRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {credentials.explain(error)}"
    return str(reply.nodes[0].node_id)


def rejections(gate: TokenInterceptor, reason: str) -> float:
    return float(gate.refused.labels(reason)._value.get())


async def test_with_the_same_lock_they_talk(papers: Papers) -> None:
    for credentials in (
        Credentials(),
        Credentials(token=TOKEN),
        read_credentials(papers.config()),
        read_credentials(papers.config(cluster_token=TOKEN)),
    ):
        async with serving(credentials) as (address, _):
            assert await ask(credentials, address) == "n"


async def test_parts_call_each_other_directly_whatever_the_proxy(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for credentials in (Credentials(), read_credentials(papers.config())):
            async with serving(credentials) as (address, _):
                assert await ask(credentials, address) == "n"
                assert await asyncio.to_thread(admin.list_nodes, address, credentials)
        with HttpPage() as url:
            assert await asyncio.to_thread(_read, url) == b"ready"


class HttpPage:
    """One HTTP page, for as long as the block."""

    def __enter__(self) -> str:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Ready)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/ready"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, *_: object) -> None: ...


def _read(url: str) -> bytes:
    with open_url(url, seconds=5) as response:
        return bytes(response.read())


async def test_only_the_token_opens_and_the_others_are_counted() -> None:
    async with serving(Credentials(token=TOKEN)) as (address, gate):
        for token, reason in (("", "no token"), ("x", "wrong token"), (TOKEN + "x", "wrong token")):
            response = await ask(Credentials(token=token), address)
            assert (
                response.startswith(f"UNAUTHENTICATED: {reason}") and "--cluster-token" in response
            )
        assert (rejections(gate, "no token"), rejections(gate, "wrong token")) == (1, 2)
        assert await ask(Credentials(token=TOKEN), address) == "n"


async def test_a_refusal_is_logged_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Credentials(token=TOKEN)) as (address, gate):
        for _ in range(5):
            await ask(Credentials(), address)
        assert rejections(gate, "no token") == 5
    assert caplog.text.count("refused /tandem.v1.Registry/List from ipv4:127.0.0.1") == 1


async def test_a_lock_that_does_not_fit_is_explained(papers: Papers, strange: Papers) -> None:
    credentials, other = read_credentials(papers.config()), read_credentials(strange.config())
    async with serving(credentials) as (address, _):
        assert "its certificate is not by an authority of --tls-ca" in await ask(other, address)
        assert "it may use TLS, which this side does not" in await ask(Credentials(), address)
        # It trusts us, but we do not trust it.
        stray = read_credentials(strange.config(tls_ca=str(papers.ca)))
        assert "it may not trust this side's certificate" in await ask(stray, address)
        assert await ask(credentials, address) == "n"
    async with serving(Credentials()) as (address, _):
        assert "it does not use TLS, and this side does" in await ask(credentials, address)


async def test_certificates_are_checked_by_host_name_or_by_the_given_name(tmp_path: Path) -> None:
    papers = issue(tmp_path, "tandem.internal")
    async with serving(read_credentials(papers.config())) as (address, _):
        response = await ask(read_credentials(papers.config()), address)
        assert "its certificate has another name; see --tls-name" in response
        credentials = read_credentials(papers.config(tls_name="tandem.internal"))
        assert await ask(credentials, address) == "n"


async def test_without_an_authority_servers_take_any_client(papers: Papers) -> None:
    server = SecurityConfig(tls_cert=str(papers.cert), tls_key=str(papers.key), cluster_token=TOKEN)
    async with serving(read_credentials(server)) as (address, _):
        assert await ask(read_credentials(papers.config(cluster_token=TOKEN)), address) == "n"
        # And as clients they trust public authorities, of which this is none.
        assert "its certificate is not by" in await ask(read_credentials(server), address)


async def test_a_strangers_message_is_not_read() -> None:
    """A message over the limit is still refused for its missing token."""
    async with serving(Credentials(token=TOKEN)) as (address, _):
        for token, code in ((TOKEN, "RESOURCE_EXHAUSTED"), ("x", "UNAUTHENTICATED")):
            metadata = (("authorization", f"Bearer {token}"),)
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    rpc = channel.unary_unary("/tandem.v1.Registry/List", None, None)
                    await rpc(bytes(5 << 20), metadata=metadata, timeout=10)
                assert caught.value.code().name == code


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
RAW = (
    random.Random(7).randbytes(4096),
    pickle.dumps({"x": list(range(50))}),
    b"GET / HTTP/1.0\r\n\r\n",
    HTTP2 + b"\xff\xff\xff\x00" + bytes(5) + bytes(1000),  # a frame of 16 MiB
    b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(1000),  # a hello of 16 MiB
)


@pytest.mark.parametrize("locked", [True, False])
async def test_garbage_on_the_control_plane_does_no_harm(papers: Papers, locked: bool) -> None:
    credentials = read_credentials(papers.config(cluster_token=TOKEN)) if locked else Credentials()
    async with serving(credentials) as (address, _):
        host, _, port = address.rpartition(":")
        for data in RAW:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # until it is dropped
            writer.close()
        assert await ask(credentials, address) == "n"


async def test_a_port_in_use_is_named() -> None:
    async with serving(Credentials()) as (address, _):
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        with pytest.raises(StartupError, match=f"cannot listen on {address} for a test"):
            Credentials().bind(server, "127.0.0.1", int(address.rpartition(":")[2]), "a test")


# ---- rotation ------------------------------------------------------------------------------------


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files each time that they are used."""
    monkeypatch.setattr("tandem.shared.security.watched_files.CHECK_SECONDS", 0.0)


def renew(old: Papers, new: Papers) -> None:
    for name in ("cert", "key", "ca"):
        getattr(old, name).write_bytes(getattr(new, name).read_bytes())


@pytest.mark.usefixtures("looks_always")
async def test_a_renewed_certificate_is_used_and_open_connections_continue(
    tmp_path: Path,
) -> None:
    papers, new = issue(tmp_path / "a", "127.0.0.1"), issue(tmp_path / "b", "127.0.0.1")
    credentials = read_credentials(papers.config(cluster_token=TOKEN))
    after = read_credentials(new.config(cluster_token=TOKEN))
    async with serving(credentials) as (address, _), credentials.channel(address) as before:
        stub = credentials.stub(RegistryStub, before)
        assert (await stub.List(pb.ListRequest(), timeout=5)).nodes
        assert "UNAVAILABLE" in await ask(after, address)
        generation = credentials.generation
        renew(papers, new)
        assert credentials.generation != generation
        assert await ask(after, address) == "n"
        assert await ask(credentials, address) == "n", "a new channel of the same lock"
        assert (await stub.List(pb.ListRequest(), timeout=5)).nodes, "the old channel"
        stranger = read_credentials(issue(tmp_path / "c", "127.0.0.1").config())
        assert "UNAVAILABLE" in await ask(stranger, address)


@pytest.mark.usefixtures("looks_always")
async def test_only_a_new_certificate_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC crashes if one handshake replaces the certificate while another begins."""
    given: list[grpc.ServerCertificateConfiguration] = []
    configuration = grpc.ssl_server_certificate_configuration

    def counted(*args: Any) -> grpc.ServerCertificateConfiguration:
        given.append(configuration(*args))
        return given[-1]

    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", counted)
    papers = issue(tmp_path / "a", "127.0.0.1")
    credentials = read_credentials(papers.config())
    async with serving(credentials) as (address, _):
        for number in (1, 2):
            assert await ask(credentials, address) == "n"  # alone, so that gRPC does not crash
            replies = await asyncio.gather(*(ask(credentials, address) for _ in range(20)))
            assert replies == 20 * ["n"]
            assert len(given) == number
            renew(papers, issue(tmp_path / "b", "127.0.0.1"))


@pytest.mark.usefixtures("looks_always")
async def test_a_certificate_without_its_key_changes_nothing(tmp_path: Path) -> None:
    papers, new = issue(tmp_path / "a", "127.0.0.1"), issue(tmp_path / "b", "127.0.0.1")
    credentials = read_credentials(papers.config())
    async with serving(credentials) as (address, _):
        papers.cert.write_bytes(new.cert.read_bytes())
        assert await ask(credentials, address) == "n"


@pytest.mark.usefixtures("looks_always")
async def test_a_token_is_rotated_without_a_refused_call(tmp_path: Path) -> None:
    """Every part accepts the next token before any of them sends it."""
    server, client = tmp_path / "server", tmp_path / "client"
    for file in (server, client):
        file.write_text("old\n")
    all_credentials = [
        read_credentials(SecurityConfig(cluster_token_file=str(file))) for file in (server, client)
    ]
    async with (
        serving(all_credentials[0]) as (address, gate),
        all_credentials[1].channel(address) as channel,
    ):
        stub = all_credentials[1].stub(RegistryStub, channel)
        for tokens in ("old\nnew\n", "new\nold\n", "new\n"):
            for file in (server, client):
                file.write_text(tokens)
                assert (await stub.List(pb.ListRequest(), timeout=5)).nodes
        assert rejections(gate, "wrong token") == 0
        assert "wrong token" in await ask(Credentials(token="old"), address)


def test_the_end_of_certificates_is_known(papers: Papers) -> None:
    ends = read_credentials(papers.config()).expiries()
    assert set(ends) == {"--tls-cert", "--tls-ca"} and all(end > 1.7e9 for end in ends.values())
    assert Credentials(token=TOKEN).expiries() == {}
