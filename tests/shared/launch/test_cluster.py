"""The launcher and its parts' lifelines, with parts that take milliseconds to start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from tandem.shared.errors import StartupError, UsageError
from tandem.shared.launch.cluster import LocalCluster
from tandem.tests.end_to_end.support.cluster import until

# The parts' program instead of tandem: the first argument chooses its behaviour.
FAKE = """
import os, signal, sys, time
from tandem.shared.process import lifeline
from tandem.shared.process.lifeline import announce_ready, announce_start, end_with_launcher
from tandem.shared.process.signals import DRAIN
what = sys.argv[1]
if what == "fails":
    sys.exit("tandem: no memory; buy some")
if what == "misled":
    print("tandem: --colour is not an option", file=sys.stderr)
    sys.exit(2)
if what == "speechless":
    sys.exit(3)
if what == "raises":
    raise ValueError("odd")
if what in ("killed", "crashes"):
    print("2026-01-01 INFO tandem.node all is well", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSEGV)
for number in (signal.SIGTERM, DRAIN):
    if what == "drains":
        signal.signal(number, lambda *_: (time.sleep(1), sys.exit(0)))
    if what in ("decode-node", "router", "serves"):
        signal.signal(number, lambda *_: sys.exit(0))
    if "busy" in sys.argv:
        signal.signal(number, lambda *_: (print("told", flush=True), time.sleep(60)))
    if what == "stubborn":
        lifeline.GRACE_SECONDS = 0.1
        signal.signal(number, signal.SIG_IGN)
if what in ("half", "halting", "starting"):
    announce_start({"registry": 8001})
if what == "halting":
    sys.exit("tandem: the port is taken")
if what not in ("slow", "starting") and "late" not in sys.argv:
    end_with_launcher()
    announce_ready({"address": "a:1", "key": os.environ.get("SECRET")})
if what == "brief":
    sys.exit("tandem: it was too much")
if "chatty" in sys.argv:
    for number in range(100_000):
        print(f"line {number:06}", flush=True)
        time.sleep(0.0005)
if "hopeless" in sys.argv:
    sys.exit("tandem: no memory")
time.sleep(60)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder in which ``python -m tandem`` runs the parts above."""
    import tandem

    folder = tmp_path / "package" / "tandem"
    folder.mkdir(parents=True)
    for name in ("shared", "__init__.py"):
        (folder / name).symlink_to(Path(tandem.__file__).parent / name)
    (folder / "__main__.py").write_text(FAKE)
    return folder.parent


@pytest.fixture
def cluster(tmp_path: Path, package: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path, os.environ | {"PYTHONPATH": str(package)})
    yield cluster
    cluster.stop()


def soon() -> float:
    return time.monotonic() + 30


def test_a_part_announces_itself_and_ends_on_sigterm(cluster: LocalCluster, tmp_path: Path) -> None:
    part = cluster.start("one", ["serves"], SECRET="s3")
    assert cluster.wait_ready(part, soon()) == {"address": "a:1", "key": "s3"}
    assert "s3" not in psutil.Process(part.process.pid).cmdline()
    cluster.check()
    assert (tmp_path / "one.log").is_file()


def test_a_part_can_be_used_before_it_serves(cluster: LocalCluster) -> None:
    part = cluster.start("one", ["half"])
    assert cluster.wait_starting(part, soon()) == {"registry": 8001}
    assert cluster.wait_ready(part, soon())["address"] == "a:1"


def test_a_part_that_ends_before_it_serves_has_not_started(cluster: LocalCluster) -> None:
    part = cluster.start("one", ["halting"])
    assert cluster.wait_starting(part, soon()) == {"registry": 8001}
    with pytest.raises(StartupError, match="one ended with exit status 1: the port is taken"):
        cluster.wait_ready(part, soon())


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fails", StartupError, "one ended with exit status 1: no memory; buy some .*one.log"),
        ("misled", UsageError, "one ended with exit status 2: --colour is not an option"),
        (
            "speechless",
            StartupError,
            r"one ended with exit status 3; its log is empty \(log: .*one",
        ),
        ("raises", StartupError, "one ended with exit status 1; its log ends with: .*Error: odd"),
        (
            "killed",
            StartupError,
            r"^one was killed \(SIGKILL\), possibly for lack of memory; see its log \S*one.log$",
        ),
        ("crashes", StartupError, r"^one was killed \(SIGSEGV\); see its log \S*one.log$"),
    ],
)
def test_a_part_that_cannot_start_has_the_last_word(
    cluster: LocalCluster, what: str, error: type[Exception], words: str
) -> None:
    part = cluster.start("one", [what])
    with pytest.raises(error, match=words):
        cluster.wait_ready(part, soon())


def test_waiting_for_one_part_notices_the_end_of_another(cluster: LocalCluster) -> None:
    slow = cluster.start("slow", ["slow"])
    cluster.start("two", ["fails"])
    with pytest.raises(StartupError, match="two ended with exit status 1: no memory"):
        cluster.wait_ready(slow, soon())


def test_a_part_that_is_too_slow_is_named_with_its_log(cluster: LocalCluster) -> None:
    part = cluster.start("slow", ["slow"])
    with pytest.raises(
        StartupError, match=r"slow is not ready in time; .*--start-timeout.*slow.log"
    ):
        cluster.wait_ready(part, time.monotonic())


class RunningCluster:
    """Routers, some nodes, and the messages about them while they serve."""

    def __init__(self, folder: Path, package: Path, *nodes: list[str], routers: int = 1) -> None:
        self.lines: list[str] = []
        self.another = False  # a decode node that another command has started
        environment = os.environ | {"PYTHONPATH": str(package)}
        self.cluster = LocalCluster(folder, environment, tell=self.lines.append)
        self.routers = [
            self.cluster.start(f"router-{number}", ["router"]) for number in range(routers)
        ]
        self.nodes = [
            self.cluster.start(f"node-{number}", arguments)
            for number, arguments in enumerate(nodes)
        ]
        for part in (*self.routers, *self.nodes):
            self.cluster.wait_ready(part, soon())
        self._closing = Event()
        self._pool = ThreadPoolExecutor(1)
        self.keeper = self._pool.submit(
            self.cluster.keep, self.routers, lambda: self.another, self._closing.is_set
        )

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(StartupError):
            self.keeper.result(30)
        self._pool.shutdown()
        self.cluster.stop()

    def until_line(self, words: str, count: int = 1) -> None:
        until(lambda: " ".join(self.lines).count(words) >= count, words, 30)


StartCluster = Callable[..., RunningCluster]


@pytest.fixture
def start_cluster(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartCluster]:
    for name, value in (
        ("FIRST_PAUSE", 0.01),
        ("MAX_PAUSE", 0.02),
        ("UNSERVED", 0.1),
        ("POLL", 0.01),
    ):
        monkeypatch.setattr(f"tandem.shared.launch.cluster.{name}_SECONDS", value)
    clusters: list[RunningCluster] = []

    def keep(*nodes: list[str], routers: int = 1) -> RunningCluster:
        clusters.append(RunningCluster(tmp_path, package, *nodes, routers=routers))
        return clusters[-1]

    yield keep
    for running in clusters:
        running.close()


def test_a_node_that_dies_is_started_again_with_its_arguments(start_cluster: StartCluster) -> None:
    running = start_cluster(["prefill-node", "--flag"], ["decode-node"])
    first, other = (part.process for part in running.nodes)
    first.kill()
    running.until_line("node-0 serves again")
    again = running.nodes[0].process
    assert again.pid != first.pid and again.poll() is None
    assert psutil.Process(again.pid).cmdline()[-2:] == ["prefill-node", "--flag"]
    assert other.poll() is None and not running.keeper.done()
    assert "node-0 was killed (SIGKILL), possibly for lack of memory; see" in running.lines[0]
    assert "it is restarted" in running.lines[0] and "(restart 1 of 5)" in running.lines[0]


def test_the_log_of_a_part_that_writes_a_lot_stays_small(
    start_cluster: StartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.launch.part_log.MAX_BYTES", 1200)
    start_cluster(["decode-node", "chatty"])
    log, earlier = tmp_path / "node-0.log", tmp_path / "node-0.log.1"

    def lines(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"line (\d{6})\n", path.read_text())]

    until(lambda: earlier.exists() and lines(earlier)[:1] > [0], "a log set aside twice", 30)
    until(lambda: lines(log)[:1] > [0] and b"\0" not in log.read_bytes(), "further lines", 30)


def test_a_node_that_drains_has_left_and_is_not_missed(start_cluster: StartCluster) -> None:
    running = start_cluster(["decode-node"], ["decode-node"])
    running.nodes[0].process.terminate()
    running.until_line("node-0 has drained and left; the other nodes keep serving")
    assert not running.keeper.done() and running.nodes[1].process.poll() is None
    # The cluster ends with the last decode node, without an error.
    running.nodes[1].process.terminate()
    running.keeper.result(30)
    assert running.lines[-1] == "no decode node is left: the last one has drained"


def test_a_decode_node_that_dies_too_often_is_given_up_and_ends_it_if_it_was_the_last(
    start_cluster: StartCluster, package: Path
) -> None:
    running = start_cluster(["decode-node"])
    running.another = True
    running.nodes[0].arguments.append("hopeless")
    running.nodes[0].process.kill()
    running.until_line("giving up")
    assert [
        f"restart {n} of 5" in line
        for n, line in enumerate(
            (line for line in running.lines if "(log:" in line or "see its log" in line), 1
        )
    ] == [True] * 5 + [False]
    assert not running.keeper.done(), "somebody else's decode node serves"
    running.another = False
    with pytest.raises(StartupError, match="no decode node is left: the last one kept dying"):
        running.keeper.result(30)


def test_a_node_that_has_served_for_a_while_may_die_again(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.launch.cluster.MAX_RESTARTS", 1)
    monkeypatch.setattr("tandem.shared.launch.cluster.GOOD_SECONDS", 0.0)
    running = start_cluster(["decode-node"])
    for number in (1, 2, 3):
        running.nodes[0].process.kill()
        running.until_line("serves again", number)


def test_a_node_that_is_not_ready_in_time_again_has_died(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_cluster(["decode-node"])
    monkeypatch.setattr(running.cluster, "_start_seconds", 0.0)
    running.nodes[0].arguments.append("late")
    running.nodes[0].process.kill()
    running.until_line("(restart 3 of 5)")


def test_the_end_of_the_router_is_the_end(start_cluster: StartCluster) -> None:
    running = start_cluster(["decode-node"])
    running.routers[0].process.kill()
    with pytest.raises(StartupError, match="router-0 was killed"):
        running.keeper.result(30)


def test_one_of_several_routers_is_started_again(start_cluster: StartCluster) -> None:
    running = start_cluster(routers=2)
    running.another = True  # nodes are elsewhere
    other = running.routers[1].process
    running.routers[0].process.kill()
    running.until_line("router-0 serves again")
    assert other.poll() is None and not running.keeper.done()
    running.routers[0].arguments.append("hopeless")
    running.routers[0].process.kill()
    running.until_line("router-0 ended with exit status 1: no memory")
    running.until_line("giving up")
    assert other.poll() is None and not running.keeper.done()
    running.routers[1].arguments.append("hopeless")
    other.kill()
    with pytest.raises(StartupError, match="no router is left"):
        running.keeper.result(30)


def test_a_restarted_part_serves_once_it_says_so(start_cluster: StartCluster) -> None:
    running = start_cluster(routers=2)
    running.another = True
    running.routers[0].arguments[0] = "half"
    running.routers[0].process.kill()
    running.until_line("router-0 serves again")
    running.routers[0].arguments[0] = "starting"
    running.routers[0].process.kill()
    running.until_line("(restart 2 of 5)")
    until(lambda: running.routers[0].announcements != b"", "the beginning of its start", 30)
    assert running.lines.count("router-0 serves again") == 1


def test_a_router_that_was_shut_down_is_no_failure(start_cluster: StartCluster) -> None:
    running = start_cluster(["decode-node"])
    running.routers[0].process.terminate()
    running.keeper.result(30)
    assert "the router-0 has been shut down" in running.lines


def test_routers_drain_at_the_same_time(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.launch.cluster.STOP_SECONDS", 0.5)
    cluster = LocalCluster(tmp_path, os.environ | {"PYTHONPATH": str(package)})
    parts = [cluster.start(f"router-{number}", ["router", "busy"]) for number in range(2)]
    parts.append(cluster.start("node", ["decode-node", "busy"]))
    try:
        for part in parts:
            cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    # All shared one time limit; the node was signalled by the end of the routers at the latest.
    assert [(tmp_path / f"router-{number}.log").read_text() for number in range(2)] == [
        "told\n"
    ] * 2


def test_parts_without_a_folder_of_logs_write_to_the_launchers_standard_error(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalCluster(None, os.environ | {"PYTHONPATH": str(package)})
    try:
        part = cluster.start("one", ["fails"])
        with pytest.raises(
            StartupError, match=r"^one ended with exit status 1; see its lines above$"
        ):
            cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    assert "tandem: no memory; buy some" in capfd.readouterr().err


def test_a_part_that_ignores_its_end_is_killed(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.launch.cluster.STOP_SECONDS", 0.5)
    cluster = LocalCluster(tmp_path, os.environ | {"PYTHONPATH": str(package)})
    part = cluster.start("one", ["stubborn"])
    try:
        cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    assert part.process.returncode == -signal.SIGKILL


def test_a_part_has_its_own_time_to_drain(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.launch.cluster.STOP_SECONDS", 0.1)
    cluster = LocalCluster(tmp_path, os.environ | {"PYTHONPATH": str(package)}, 30.0)
    part = cluster.start("one", ["drains"])
    try:
        cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    assert part.process.returncode == 0


def test_an_interrupted_stop_kills_the_parts_that_still_run(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path, os.environ | {"PYTHONPATH": str(package)})
    parts = [cluster.start("one", ["stubborn"]), cluster.start("two", ["serves"])]
    for part in parts:
        cluster.wait_ready(part, soon())

    def interrupted(seconds: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts[0].process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.stop()
    monkeypatch.undo()
    assert [part.process.wait(10) for part in parts] == [-signal.SIGKILL] * 2


def test_logs_that_cannot_be_written_are_a_startup_error(package: Path) -> None:
    cluster = LocalCluster(Path("/proc/no"), os.environ)
    try:
        with pytest.raises(StartupError, match=r"cannot write logs to /proc/no.*--log-dir"):
            cluster.start("one", ["serves"])
    finally:
        cluster.stop()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from threading import Event
from tandem.shared.launch.cluster import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), os.environ)
part = cluster.start("one", [sys.argv[2]])
cluster.wait_ready(part, time.monotonic() + 30)
print(part.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["serves", "stubborn"])
def test_a_part_ends_with_its_launcher_however_that_ends(
    tmp_path: Path, package: Path, what: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), what],
        env=os.environ | {"PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        part = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        until(lambda: not part.is_running() or part.status() == "zombie", "the part to end", 30)
