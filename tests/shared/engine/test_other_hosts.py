"""A node whose second rank is on another host: launcher and head share this process, ranks have
their own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tandem import EngineConfig, SamplingParams
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import HandoffConfig, SecurityConfig
from tandem.shared.engine import executor, join, other_hosts
from tandem.shared.engine.channel import framed
from tandem.shared.engine.core import StepOutput
from tandem.shared.engine.headless import HeadlessHost
from tandem.shared.engine.messages import (
    CODEC,
    HostAccepted,
    HostJoins,
    HostRefused,
    JoinSecrets,
    RankEnded,
    RankJoins,
    RankMessage,
)
from tandem.shared.engine.other_hosts import OtherHosts
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.start import (
    DataPlaneOptions,
    NodeEngine,
    NodeIdentity,
    check_kinds,
    start_engine,
)
from tandem.shared.engine.work import Generate
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.kv.planning import NodeDevice, RankDevice, RankMemory
from tandem.shared.security.credentials import read_credentials
from tandem.shared.security.several_hosts import check_hosts
from tandem.shared.version import versions
from tandem.shared.weights.folder_kind import SINGLE
from tandem.tests.support.certificates import issue
from tandem.tests.support.checkpoints.tiny_models import cached
from tandem.tests.support.forked import ForkedRank, fork_rank
from tandem.tests.support.waiting import until

HEAD = "127.0.0.2"
IDENTITY = NodeIdentity("node", 1)
SECRETS = JoinSecrets(tokens=("new", "old"))
SECONDS = 60.0
FINGERPRINT = {"layers": "4", "norm": "rms", "weights": "9 tensors of BF16 (a1)"}


def free_ports() -> int:
    """The first of two free ports."""
    while True:
        with socket.create_server((HEAD, 0)) as first:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server((HEAD, port + 1)):
                return port


def config_of(**changes: object) -> EngineConfig:
    options = {
        "model": str(builtin_model_path()),
        "dtype": "float32",
        "threads": 1,
        "num_blocks": 64,
        "max_model_len": 512,
        "device": "cpu",
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_addr": HEAD,
        "master_port": free_ports(),
    }
    return EngineConfig(**(options | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def listening(
    config: EngineConfig, secrets: JoinSecrets = SECRETS
) -> AsyncIterator[OtherHosts]:
    hosts = OtherHosts(config, secrets)
    await hosts.listen()
    try:
        yield hosts
    finally:
        await hosts.close("the test has ended")


# ---- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 cannot be divided .* multiple"),
        ({"tensor_parallel_size": 1}, "--tensor-parallel-size 1 cannot be divided"),
        ({"node_rank": 2}, "--node-rank 2 with --nnodes 2: hosts are numbered from 0 to 1"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank 1 with --nnodes 1"),
        ({"headless": True}, "--headless is for hosts with a --node-rank above 0"),
        ({"master_addr": None}, "--nnodes 2 needs --master-addr"),
        ({"master_addr": "0.0.0.0"}, "--nnodes 2 needs --master-addr"),
        ({"device": "cuda", "devices": "0,1"}, "names 2 devices on each of 2 hosts, but --tensor"),
    ],
)
def test_contradictory_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config_of(**options)


def test_ranks_are_divided_among_the_hosts() -> None:
    config = config_of(tensor_parallel_size=None)
    assert (config.world_size, config.ranks_per_host) == (2, 1)
    on_gpus = replace(config, device="cuda", devices="0,1", node_rank=1, headless=True)
    assert (on_gpus.world_size, on_gpus.ranks_per_host) == (4, 2)


@pytest.mark.parametrize(
    ("config", "handoff", "security", "message"),
    [
        ({}, {}, {}, "--nnodes 2 needs a cluster token"),
        ({}, {"kv_advertise": "a:1"}, {"cluster_token": "t"}, "--kv-advertise is one host's"),
        ({"master_addr": "h"}, {}, {"cluster_token": "t"}, "neither encrypted nor .*--insecure"),
        ({"master_addr": "h"}, {"insecure": True}, {"cluster_token": "t"}, ""),
        ({"nnodes": 1}, {}, {}, ""),
    ],
)
def test_hosts_need_a_token_and_a_trusted_network(
    config: dict[str, object],
    handoff: dict[str, object],
    security: dict[str, str],
    message: str,
) -> None:
    credentials = read_credentials(SecurityConfig(**security))
    options = config_of(**config), HandoffConfig(**handoff)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        check_hosts(*options, credentials)


async def test_only_nodes_have_ranks_on_other_hosts() -> None:
    with pytest.raises(UsageError, match="--nnodes 2: only a node"):
        await start_engine(config_of(), IDENTITY)


# ---- joining ---------------------------------------------------------------------------------


def about(**changes: object) -> HostJoins:
    fields = {
        "node_rank": 1,
        "nnodes": 2,
        "size": 2,
        "versions": versions(),
        "fingerprint": FINGERPRINT,
        "address": "127.0.0.9",
        "model_path": "m",
        "device": "cpu",
        "devices": (),
        "threads": 1,
    }
    return HostJoins(**(fields | changes))  # type: ignore[arg-type]


async def reply_to(
    config: EngineConfig, message: RankMessage, secrets: JoinSecrets = SECRETS
) -> RankMessage | None:
    """The head's reply to the first message of a connection."""

    def call() -> RankMessage | None:
        channel = join.connect(HEAD, config.master_port, secrets)
        try:
            channel.send(message)
            return channel.receive()
        finally:
            channel.close()

    return await asyncio.to_thread(call)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nnodes": 3}, r"node rank 1 \(127\.0\.0\.9\) has --nnodes 3, the head 2"),
        ({"size": 4}, "has --tensor-parallel-size 4, the head 2"),
        ({"versions": "Tandem 9"}, r"has Tandem 9, the head Tandem .* with torch .*; install the"),
        ({"node_rank": 0}, r"node rank 0 .* is none of the hosts 1 to 1"),
        ({"fingerprint": FINGERPRINT | {"layers": "5"}}, "another model .*: layers is 5, not 4"),
        ({"fingerprint": {"layers": "4"}}, "another model .*: norm is None, not rms"),
        (
            {"fingerprint": FINGERPRINT | {"weights": "9 tensors of Q4_K (b2)"}},
            r"weights is 9 .* Q4_K \(b2\), not 9 .* BF16 \(a1\); give all hosts the same files",
        ),
    ],
)
async def test_a_host_that_does_not_fit_is_refused_on_both_sides_and_the_wait_goes_on(
    changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of()
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        reply = await reply_to(config, about(**changes))
        assert isinstance(reply, HostRefused)
        assert re.search(reason, reply.reason), reply.reason
        await until(lambda: reply.reason in caplog.text)
        assert await reply_to(config, about()) == HostAccepted()
        assert [host.about for host in await joining] == [about()]


async def test_a_host_with_another_training_of_the_model_is_refused(tmp_path: Path) -> None:
    other = shutil.copytree(builtin_model_path(), tmp_path / "other")
    weights = load_file(other / SINGLE)
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / SINGLE)
    config = config_of()
    async with listening(config) as hosts:
        head = asyncio.create_task(start_engine(config, IDENTITY, hosts=hosts))
        refused = (
            r"refuses this host: .* another model .*: weights is (\d+ tensors of \w+).*, not \1"
        )
        host = HeadlessHost(replace(config, node_rank=1, model=str(other)), SECRETS)
        with pytest.raises(StartupError, match=refused):
            await asyncio.wait_for(host.run(), SECONDS)
        head.cancel()
        await asyncio.gather(head, return_exceptions=True)


async def test_a_second_host_with_the_same_number_is_refused() -> None:
    config = config_of(nnodes=3, tensor_parallel_size=3)
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        first = await asyncio.to_thread(join.connect, HEAD, config.master_port, SECRETS)
        same = {"nnodes": 3, "size": 3}
        first.send(about(**same))
        await until(lambda: 1 in hosts._hosts)
        reply = await reply_to(config, about(**same, address="127.0.0.8"))
        assert isinstance(reply, HostRefused)
        assert "node rank 1 (127.0.0.9) has joined already; give 127.0.0.8 another" in reply.reason
        first.close()  # so its number is free again
        await until(lambda: 1 not in hosts._hosts)
        joining.cancel()


async def test_hosts_that_do_not_join_are_named() -> None:
    config = config_of(nnodes=4, tensor_parallel_size=4, join_timeout=0.3)
    async with listening(config) as hosts:
        channel = await asyncio.to_thread(join.connect, HEAD, config.master_port, SECRETS)
        channel.send(about(nnodes=4, size=4, node_rank=2))
        with pytest.raises(StartupError, match=r"node rank 1, 3 did not join at .* within 0\.3 s"):
            await hosts.join(FINGERPRINT)
        channel.close()


async def test_the_head_tells_why_the_last_host_was_refused() -> None:
    config = config_of(join_timeout=1.0)
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        with pytest.raises(StartupError, match="has another cluster token than this host"):
            await reply_to(config, about(), JoinSecrets(tokens=("other",)))
        expected = r"node rank 1 did not .* \(the last .*: 127.* refused: it has another cluster"
        with pytest.raises(StartupError, match=expected):
            await joining


@pytest.mark.parametrize("token", ["other", "new", "old"])
async def test_only_hosts_with_a_cluster_token_join(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of()
    async with listening(config):
        expected = (
            pytest.raises(StartupError, match="has another cluster token than this host")
            if token == "other"
            else contextlib.nullcontext()
        )
        with expected:
            channel = await asyncio.to_thread(
                join.connect, HEAD, config.master_port, JoinSecrets(tokens=(token,))
            )
            channel.close()
        if token == "other":
            await until(lambda: "is refused: it has another cluster token" in caplog.text)


async def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
    async with listening(config) as hosts:
        addresses = set()
        for _ in range(3):
            with pytest.raises(StartupError):
                await reply_to(config, about(), JoinSecrets(tokens=("other",)))
            addresses.add(hosts._last_refusal)
    assert len(addresses) == 3
    assert caplog.text.count("it has another cluster token") == 1


async def test_a_head_without_the_token_is_refused() -> None:
    """Whoever has taken the head's address gets no message."""
    config, received = config_of(), bytearray()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(join.greeting())
            received.extend(connection.recv(join.REPLY_BYTES))
            connection.sendall(bytes(32))
            received.extend(connection.recv(1))

    with socket.create_server((HEAD, config.master_port)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(StartupError, match="another cluster token"):
            await reply_to(config, about())
        thread.join()
    assert len(received) == join.REPLY_BYTES


async def test_nothing_is_decoded_before_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CODEC, "decode", lambda data: pytest.fail("it was decoded"))
    config = config_of()
    async with listening(config):
        reader, writer = await asyncio.open_connection(HEAD, config.master_port)
        writer.write(framed(about()) + bytes(100))
        data = await asyncio.wait_for(reader.read(), SECONDS)
        assert data[join.GREETING_BYTES :] == join.REFUSAL
        writer.close()


async def test_strangers_that_only_connect_keep_no_host_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(other_hosts, "MAX_UNPROVED", 3)
    config = config_of()
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        strangers = [await asyncio.open_connection(HEAD, config.master_port) for _ in range(4)]
        for reader, _ in strangers:
            assert await reader.readexactly(join.GREETING_BYTES)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):  # there is no place for four
            await asyncio.wait_for(strangers[0][0].readexactly(1), SECONDS)
        assert await reply_to(config, about()) == HostAccepted()
        await joining
        for _, writer in strangers:
            writer.close()
    assert "is refused" not in caplog.text


async def test_a_connection_without_a_proof_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(other_hosts, "HANDSHAKE_SECONDS", 0.1)
    config = config_of()
    async with listening(config):
        reader, writer = await asyncio.open_connection(HEAD, config.master_port)
        assert len(await asyncio.wait_for(reader.read(), SECONDS)) == join.GREETING_BYTES
        writer.close()
    assert "is refused: it proves no cluster token in time" in caplog.text


async def test_a_host_that_vanishes_is_not_reported_as_one_without_a_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of()
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        channel = await asyncio.to_thread(join.connect, HEAD, config.master_port, SECRETS)
        channel.send(about())
        (host,) = await joining
        transport = host.writer.transport
        transport._fatal_error(TimeoutError(110, "timed out"))  # type: ignore[attr-defined]
        await asyncio.wait_for(host.statuses[1], SECONDS)
        channel.close()
    assert "is refused" not in caplog.text


async def test_a_rank_that_does_not_connect_or_has_ended_is_named_with_its_host() -> None:
    config = config_of()
    async with listening(config) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        channel = await asyncio.to_thread(join.connect, HEAD, config.master_port, SECRETS)
        channel.send(about())
        await joining
        rank = r"^rank 1 of node rank 1 \(127\.0\.0\.9\)"
        with pytest.raises(StartupError, match=rf"{rank} did not connect within 0\.01 s; see that"):
            await hosts.connection(1, 0.01)
        channel.send(RankEnded(1, -9))
        with pytest.raises(StartupError, match=rf"{rank} has ended; see that host's log"):
            await hosts.connection(1, SECONDS)
        channel.close()


async def test_a_rank_that_is_not_expected_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
    async with listening(config):
        assert await reply_to(config, RankJoins(1)) is None
    assert "is refused: no rank 1 is expected" in caplog.text


async def test_a_host_of_another_version_is_refused_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of()
    other = CODEC.version + 1
    async with listening(config):

        def call() -> bytes:
            channel = join.connect(HEAD, config.master_port, SECRETS)
            data = framed(about())
            channel._stream.sendall(data[:4] + other.to_bytes(4, "little") + data[8:])
            reply = bytearray(12)
            channel._stream.recv_into(memoryview(reply))
            channel.close()
            return bytes(reply)

        reply = await asyncio.to_thread(call)
    assert reply[4:8] == CODEC.version.to_bytes(4, "little")  # with which it cannot be decoded
    assert "is refused: it has another version of Tandem than the head's" in caplog.text


async def test_a_head_of_another_version_is_named() -> None:
    config = config_of()
    host = HeadlessHost(replace(config, node_rank=1), SECRETS)

    def greet(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            challenge = join.greeting()
            connection.sendall(challenge)
            reply = connection.recv(join.REPLY_BYTES, socket.MSG_WAITALL)
            connection.sendall(join.admission(SECRETS.tokens, challenge, reply))
            data = framed(HostAccepted())
            other = (CODEC.version + 1) % (1 << 32)
            connection.sendall(data[:4] + other.to_bytes(4, "little") + data[8:])
            connection.recv(1 << 20)

    with socket.create_server((HEAD, config.master_port)) as server:
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        with pytest.raises(StartupError, match=r"another version of Tandem than .*; install the"):
            await host.run()
        thread.join()


async def test_a_joiner_says_what_is_wrong_with_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(join_timeout=0.1)
    host = HeadlessHost(replace(config, node_rank=1), SECRETS)
    with pytest.raises(StartupError, match=r"cannot be reached within 0\.1 s at 127.0.0.2:.*refus"):
        await host.run()
    with socket.create_server((HEAD, config.master_port)) as server:

        def speak() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"SSH-2.0-x" * 9)
                connection.recv(1)

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(StartupError, match="is not the head of a node: another program"):
            await reply_to(config, about())
        thread.join()
        monkeypatch.setattr(join, "HANDSHAKE_SECONDS", 0.1)
        with pytest.raises(StartupError, match="accepts connections, but does not greet"):
            await reply_to(config, about())


async def test_a_head_waits_for_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes makes a pod's name known after the pod has started."""
    monkeypatch.setattr(other_hosts, "NAME_RETRY_SECONDS", 0.01)
    config, known, asked = config_of(), socket.getaddrinfo, []

    def resolve(host: str, *rest: int, **more: int) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(HEAD, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with listening(replace(config, master_addr="prefill-0.prefill")):
        assert asked == ["prefill-0.prefill"] * 3
        writer = (await asyncio.open_connection(HEAD, config.master_port))[1]
        writer.close()
    monkeypatch.setattr(other_hosts, "NAME_SECONDS", 0.0)
    asked.clear()
    with pytest.raises(StartupError, match=r"cannot listen on prefill-0\.prefill:.*not known; --m"):
        await OtherHosts(replace(config, master_addr="prefill-0.prefill"), SECRETS).listen()


async def test_a_head_that_cannot_listen_says_why() -> None:
    config = config_of(master_addr="192.0.2.1")
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:\d+ .*--master-addr"):
        await OtherHosts(config, SECRETS).listen()
    config = config_of()
    with (
        socket.create_server((HEAD, config.master_port)),
        pytest.raises(StartupError, match="--master-port free there"),
    ):
        await OtherHosts(config, SECRETS).listen()


# ---- TLS -------------------------------------------------------------------------------------


def with_tls(folder: Path, *names: str) -> JoinSecrets:
    papers = issue(folder, *names)
    return JoinSecrets(
        tokens=("new",),
        certificate=papers.cert.read_bytes(),
        key=papers.key.read_bytes(),
        authority=papers.ca.read_bytes(),
    )


async def test_both_sides_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    config = config_of()
    ours, theirs = with_tls(tmp_path / "a", HEAD), with_tls(tmp_path / "b", HEAD)
    async with listening(config, ours):
        with pytest.raises(StartupError, match=r"no TLS with the head .*--tls-ca"):
            await reply_to(config, about(), theirs)
        with pytest.raises(StartupError):  # by the head, which trusts another authority
            await reply_to(config, about(), replace(theirs, authority=ours.authority))
        named = replace(ours, name="tandem.example")
        with pytest.raises(StartupError, match=r"tandem\.example.*--tls-name"):
            await reply_to(config, about(), named)


async def test_a_tls_stream_carries_both_directions_at_once(tmp_path: Path) -> None:
    """One thread waits for messages, while another sends more than the buffers between hold."""
    config, secrets = config_of(), with_tls(tmp_path, HEAD)
    received: list[RankMessage | None] = []
    async with listening(config, secrets) as hosts:
        joining = asyncio.create_task(hosts.join(FINGERPRINT))
        channel = await asyncio.to_thread(join.connect, HEAD, config.master_port, secrets)
        reading = threading.Thread(target=lambda: received.append(channel.receive()))
        reading.start()
        long = {"layers": "x" * (8 << 20)}
        await asyncio.to_thread(channel.send, about(fingerprint=FINGERPRINT | long))
        await asyncio.to_thread(reading.join)
        channel.close()
        joining.cancel()
    (reply,) = received
    assert isinstance(reply, HostRefused) and "another model" in reply.reason


# ---- ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A node with a rank here and one on another host, and the reasons for which it was lost."""

    engine: NodeEngine
    hosts: OtherHosts
    launcher: asyncio.Task[None]
    lost: list[str]
    ranks: list[psutil.Process]


@asynccontextmanager
async def pair(
    config: EngineConfig, secrets: JoinSecrets = SECRETS, prelude: str = ""
) -> AsyncIterator[Pair]:
    """Both ranks are forked, and gone at the end."""
    lost: list[str] = []
    started: dict[int, psutil.Process] = {}

    async def start_rank(channel: socket.socket) -> ForkedRank:
        rank = await fork_rank(channel, prelude)
        started[rank.pid] = psutil.Process(rank.pid)
        return rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "start_rank", start_rank)
        async with listening(config, secrets) as hosts:
            host = HeadlessHost(replace(config, node_rank=1), secrets)
            launcher = asyncio.create_task(host.run())
            plane = DataPlaneOptions(handoff=HandoffConfig(), listen=True)
            engine = None
            try:
                engine = await start_engine(
                    config, IDENTITY, data_plane=plane, hosts=hosts, on_lost=lost.append
                )
                yield Pair(engine, hosts, launcher, lost, list(started.values()))
            finally:
                if engine is not None:
                    await engine.ranks.stop()
                await hosts.close("the test has ended")
                with contextlib.suppress(StartupError, asyncio.CancelledError):
                    await asyncio.wait_for(launcher, SECONDS)
    await until(lambda: not any(rank.is_running() for rank in started.values()))


async def greedy(engine: NodeEngine) -> list[int]:
    """The tokens of a prompt."""
    stepping = asyncio.create_task(engine.core.run())
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    one = Sequence(engine.core.new_id(), list(range(20, 60)), Generate(params))
    outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
    engine.core.submit(one, outputs.put_nowait)
    try:
        async with asyncio.timeout(SECONDS):
            while (await outputs.get()).finish_reason is None:
                pass
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
    return one.outputs


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(cached("qwen3", tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("size", [2, 4])
async def test_ranks_on_two_hosts_compute_what_they_do_on_one(
    size: int, tiny_model: str, tmp_path: Path
) -> None:
    config = config_of(model=tiny_model, tensor_parallel_size=size)
    async with pair(config, with_tls(tmp_path, HEAD)) as node:
        tokens = await greedy(node.engine)
        assert len(node.engine.endpoints) == node.engine.world_size == len(node.ranks) == size
        listening_at = {
            connection.laddr.ip
            for rank in node.ranks
            for connection in rank.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening_at == {HEAD, "127.0.0.1"}
        # The head ends in order, and the launcher with it.
        await node.engine.ranks.stop()
        await node.hosts.close("")
        await asyncio.wait_for(node.launcher, SECONDS)
    alone = replace(config, nnodes=1, master_addr=None, tensor_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "start_rank", fork_rank)
        engine = await start_engine(alone, IDENTITY)
    try:
        assert tokens == await greedy(engine)
    finally:
        await engine.ranks.stop()


@pytest.mark.parametrize("victim", [0, 1, "launcher"])
async def test_a_rank_that_is_lost_on_any_host_loses_the_node(victim: int | str) -> None:
    async with pair(config_of()) as node:
        if isinstance(victim, str):
            node.launcher.cancel()
            expected = r"rank 1 of node rank 1 \(127\.0\.0\.1\) "
        else:
            node.ranks[victim].kill()
            expected = ("rank 0", r"rank 1 of node rank 1 \(127\.0\.0\.1\)")[victim]
            expected += r" was killed \(SIGKILL\)"
        await until(lambda: bool(node.lost), SECONDS)
        assert re.match(expected, node.lost[0]), node.lost
        await node.engine.ranks.stop()
        await node.hosts.close(node.lost[0])
        if victim != "launcher":
            with pytest.raises(StartupError, match=f"the head has ended: {expected}"):
                await asyncio.wait_for(node.launcher, SECONDS)


async def test_a_rank_of_another_host_that_is_stuck_is_killed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "PING_SECONDS", 0.05)
    async with pair(config_of()) as node:
        node.ranks[1].suspend()
        await until(lambda: bool(node.lost), SECONDS)
        assert "rank 1 of node rank 1 (127.0.0.1) gave no sign of life" in node.lost[0]
        await node.engine.ranks.stop()
        assert not node.ranks[1].is_running()


async def test_a_head_that_is_gone_ends_the_other_hosts() -> None:
    async with pair(config_of()) as node:
        for host in node.hosts._hosts.values():
            host.writer.transport.abort()  # as a killed process does
        with pytest.raises(StartupError, match=r"the head at 127\.0\.0\.2:\d+ is gone"):
            await asyncio.wait_for(node.launcher, SECONDS)
        await until(lambda: bool(node.lost))
        assert "rank 1 of node rank 1" in node.lost[0]


async def test_a_taken_port_of_the_ranks_is_an_error_of_the_start() -> None:
    config = config_of()
    error = pytest.raises(StartupError, match=r"rank 0 cannot listen .* another --master-port")
    with socket.create_server((HEAD, config.master_port + 1)), error:
        async with pair(config):
            pass


async def test_ranks_that_do_not_meet_name_the_interface() -> None:
    prelude = "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'none0'"
    with pytest.raises(StartupError, match=r"did not meet .* GLOO_SOCKET_IFNAME and NCCL_SOCKET_I"):
        async with pair(config_of(), prelude=prelude):
            pass


async def test_devices_of_two_kinds_are_rejected() -> None:
    devices = [RankDevice(kind, f"a {kind}", 1, 1) for kind in ("cuda", "cpu")]
    with pytest.raises(StartupError, match=r"rank 1 runs on a cpu, rank 0 on a cuda: .*--device"):
        check_kinds(devices)


def test_ranks_of_other_hosts_do_not_share_the_memory_of_this_one() -> None:
    memory = [RankMemory(free_bytes=1000, used_bytes=0, bytes_per_block=1)] * 4
    devices = (RankDevice("cpu", "a CPU", 1000, 1000),) * 4
    assert NodeDevice(devices).cache_bytes(memory) == 250
    assert NodeDevice(devices, hosts=2).cache_bytes(memory) == 500
