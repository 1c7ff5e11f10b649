"""A node's hold on its ranks, with real rank processes of the built-in model."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from tandem import EngineConfig
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.config import HandoffConfig
from tandem.shared.engine import executor, watchdog
from tandem.shared.engine.executor import ExecutorLostError, MultiprocessExecutor
from tandem.shared.engine.messages import CacheAllocated, RankSettings
from tandem.shared.engine.other_hosts import RemoteProcess
from tandem.shared.engine.plan import SlotLimits, StepPlan, TokenMasks
from tandem.shared.engine.start import DataPlaneOptions, NodeEngine, NodeIdentity, start_engine
from tandem.shared.errors import StartupError
from tandem.shared.handoff.plane.messages import Event
from tandem.shared.telemetry.logs import LogSettings
from tandem.tests.support.forked import ForkedRank, fork_rank
from tandem.tests.support.waiting import until

CONFIG = EngineConfig(model=str(builtin_model_path()), threads=1, num_blocks=64, max_model_len=512)
IDENTITY = NodeIdentity("node", 1)
SECONDS = 60.0

OLD_DRIVER = """
import torch
def init():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please")
torch.cuda.is_available = lambda: False
torch.cuda.init = init
torch.version.cuda = "13.0"
"""
FAILS_AS_THE_SECOND = """
from tandem.shared.engine.rank import loading
from tandem.shared.errors import StartupError
load_model = loading.load_model
def fail(settings, *others):
    if settings.rank == 1:
        raise StartupError("the second rank has no compiler")
    return load_model(settings, *others)
loading.load_model = fail
"""


def ranks(engine: NodeEngine) -> list[psutil.Process]:
    local = [one.process for one in engine.ranks._ranks]
    return [psutil.Process(one.pid) for one in local if not isinstance(one, RemoteProcess)]


def run_first(monkeypatch: pytest.MonkeyPatch, prelude: str) -> None:
    """Ranks are forked, and run ``prelude`` first."""
    monkeypatch.setattr(executor, "start_rank", partial(fork_rank, prelude=prelude))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this test are forked: others are started as they are outside of tests."""
    run_first(monkeypatch, "")


@pytest.mark.usefixtures("forked")
async def test_a_rank_that_dies_between_steps_is_noticed() -> None:
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = await start_engine(CONFIG, IDENTITY, on_lost=lost.set_result)
    try:
        ranks(engine)[0].kill()
        assert "rank 0 was killed (SIGKILL), possibly for lack of memory" in await asyncio.wait_for(
            lost, SECONDS
        )
    finally:
        await engine.ranks.stop()
    engine.ranks.send_masks(TokenMasks(1, {}))  # computed by a thread meanwhile


async def test_a_rank_that_ends_while_it_is_killed_keeps_its_exit_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(20):
        process = await asyncio.create_subprocess_exec("sleep", "60")
        while process.returncode is None:
            executor.kill_process(process)
            await asyncio.sleep(0)
        executor.kill_process(process)
        assert process.returncode == -signal.SIGKILL
    assert "child process" not in caplog.text


async def test_a_rank_that_is_too_slow_is_an_error_of_the_start() -> None:
    config = replace(CONFIG, load_timeout=0.01)
    with pytest.raises(StartupError, match=r"rank 0 sent no DeviceOpened within 0\.01 s.*--load-t"):
        await start_engine(config, IDENTITY)


@pytest.mark.parametrize(
    ("prelude", "options", "message"),
    [
        # The first rank would wait a minute at their rendezvous.
        (FAILS_AS_THE_SECOND, {}, r"^the second rank has no compiler$"),
        (
            OLD_DRIVER,
            {"device": "cuda"},
            r"^--device cuda: The NVIDIA driver .* 11040\); update it",
        ),
    ],
)
async def test_a_rank_that_cannot_start_is_reported_at_once_and_ends_with_the_others(
    prelude: str,
    options: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    started: list[psutil.Process] = []

    async def start_rank(channel: socket.socket) -> ForkedRank:
        rank = await fork_rank(channel, prelude)
        started.append(psutil.Process(rank.pid))
        return rank

    monkeypatch.setattr(executor, "start_rank", start_rank)
    config = replace(CONFIG, tensor_parallel_size=2, **options)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=message):
        async with asyncio.timeout(SECONDS / 2):
            await start_engine(config, IDENTITY)
    await until(lambda: len(started) == 2 and not any(rank.is_running() for rank in started))
    assert "Traceback" not in capfd.readouterr().err


LEAVING = """
import time
from tandem.shared.engine.rank import step_profile
from tandem.shared.errors import StartupError

def profiled(model, *_):
    if model.tp.rank == 0:
        time.sleep(600)
    raise StartupError("a step does not fit")

step_profile.memory_of = profiled
"""


async def test_a_rank_that_cannot_load_ends_the_start_while_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_first(monkeypatch, LEAVING)
    with pytest.raises(StartupError, match=r"^a step does not fit$"):
        async with asyncio.timeout(SECONDS):
            await start_engine(replace(CONFIG, tensor_parallel_size=2), IDENTITY)


async def test_ranks_listen_on_loopback_and_end_only_when_their_head_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "PING_SECONDS", 0.01)
    monkeypatch.setattr(executor, "MAX_MISSED_PINGS", 10_000)
    lost: list[str] = []
    config = replace(CONFIG, tensor_parallel_size=2)
    engine = await start_engine(config, IDENTITY, on_lost=lost.append)
    try:
        folder = engine.ranks._rendezvous_folder
        assert folder is not None
        meeting = folder.name
        assert os.stat(meeting).st_mode & 0o077 == 0
        addresses = [
            c.laddr.ip for p in ranks(engine) for c in p.net_connections("inet") if not c.raddr
        ]
        assert addresses and all(ipaddress.ip_address(ip).is_loopback for ip in addresses), (
            addresses
        )
        for one, process in zip(engine.ranks._ranks, ranks(engine), strict=True):
            # As a service manager or a terminal sends them, to all of a group.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
            for _ in range(3):
                await until(lambda one=one: one.missed_pings > 0)  # type: ignore[misc]
                await until(lambda one=one: one.missed_pings == 0)  # type: ignore[misc]
    finally:
        await engine.ranks.stop()
    assert lost == []
    assert os.path.basename(meeting) not in os.listdir(tempfile.gettempdir())


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("slow_head", [False, True])
async def test_an_event_that_cannot_be_handled_ends_the_node(
    slow_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event may arrive before the head has the rank's last reply, or after."""
    reply = MultiprocessExecutor._reply

    async def late(self: MultiprocessExecutor, rank: Any, kind: type, seconds: float) -> Any:
        message: Any = await reply(self, rank, kind, seconds)
        if kind is CacheAllocated:
            await asyncio.wait_for(asyncio.shield(rank.pump), SECONDS)
        return message

    if slow_head:
        monkeypatch.setattr(MultiprocessExecutor, "_reply", late)

    def cannot(rank: int, event: Event) -> None:
        raise IndexError("no place for it")

    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    # The data plane's first report may come before or after the cache is there.
    try:
        engine = await start_engine(
            CONFIG,
            IDENTITY,
            data_plane=DataPlaneOptions(handoff=HandoffConfig(), listen=True),
            on_event=cannot,
            on_lost=lost.set_result,
        )
    except StartupError as error:
        assert "a message of rank 0 could not be handled" in str(error)
        return
    try:
        assert "a message of rank 0 could not be handled" in await asyncio.wait_for(lost, SECONDS)
    finally:
        await engine.ranks.stop()


@pytest.mark.usefixtures("forked")
async def test_a_rank_that_is_stuck_is_lost_with_the_step_that_waits_for_it_and_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "PING_SECONDS", 0.05)
    monkeypatch.setattr(executor, "STOP_SECONDS", 2 * SECONDS)  # that it is not given
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = await start_engine(CONFIG, IDENTITY, on_lost=lost.set_result)
    try:
        (rank,) = ranks(engine)
        rank.suspend()
        engine.ranks.submit(StepPlan.of(1, []), [])
        with pytest.raises(ExecutorLostError, match="rank 0 gave no sign of life"):
            await asyncio.wait_for(engine.ranks.result(), SECONDS)
        assert "no sign of life" in lost.result()
    finally:
        await asyncio.wait_for(engine.ranks.stop(), SECONDS)
    assert not rank.is_running()


HANGING = """
import sys, threading
from tandem.shared.engine.rank import process
process.RankProcess._step = lambda self, request: threading.Event().wait()
"""


async def test_a_rank_whose_main_thread_alone_hangs_in_a_step_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_first(monkeypatch, HANGING)
    monkeypatch.setattr(executor, "PING_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "MAX_STUCK_FIRST", 5)
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = await start_engine(CONFIG, IDENTITY, on_lost=lost.set_result)
    try:
        engine.ranks.submit(StepPlan.of(1, []), [])
        with pytest.raises(
            ExecutorLostError, match="rank 0 replies to pings, but has computed no layer"
        ):
            await asyncio.wait_for(engine.ranks.result(), SECONDS)
        assert "computed no layer" in lost.result()
    finally:
        await engine.ranks.stop()


OTHER_VERSION = """
from tandem.shared.engine import messages
messages.CODEC.version += 1
"""


async def test_a_rank_of_another_version_is_rejected_in_words_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_first(monkeypatch, OTHER_VERSION)
    with pytest.raises(StartupError, match=r"rank 0 sent .*: message of version .*Restart it"):
        await start_engine(CONFIG, IDENTITY)
    assert "the head's messages cannot be read: message of version" in capfd.readouterr().err


def test_a_rank_that_cannot_read_its_channel_ends() -> None:
    """A rank that cannot read its channel would not notice the end of its head either."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem.shared.engine.rank.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
            )
        with process:
            ours.sendall(b"\x01\x00\x00\x00\xc1")
            try:
                assert process.wait(SECONDS) == 1
            finally:
                process.kill()


def test_a_rank_whose_log_nobody_reads_goes_on() -> None:
    ours, theirs = socket.socketpair()
    unread, log = os.pipe()
    room = fcntl.fcntl(log, fcntl.F_GETPIPE_SZ)
    os.write(log, bytes(room))
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem.shared.engine.rank.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=log,
            )
        os.close(log)
        with process:
            ours.sendall(b"\x01\x00\x00\x00\xc1")  # unreadable, which it logs
            try:
                assert process.wait(SECONDS) == 1
            finally:
                process.kill()
                os.close(unread)


@pytest.mark.usefixtures("forked")
async def test_a_rank_logs_as_its_head_does(capfd: pytest.CaptureFixture[str]) -> None:
    log = LogSettings(form="json", role="decode-node", node_id="d7", rank="0")
    ranks = MultiprocessExecutor(load_seconds=SECONDS)
    try:
        await ranks.start([RankSettings(model_path="", device="cpu", log=log)])
        with pytest.raises(StartupError, match="AttributeError"):
            await ranks.allocate(1, SlotLimits(1, 1))  # there is no model
    finally:
        await ranks.stop()
    (line,) = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert (line["level"], line["node_id"], line["rank"]) == ("error", "d7", "0")
    assert "Traceback" in line["exception"]
