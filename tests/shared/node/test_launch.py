"""The launcher and its parts' lifelines, with parts that take milliseconds to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.shared.errors import StartupError, UsageError
from tandem.shared.node.launch import Cluster
from tandem.tests.end_to_end.cluster import until

# What the parts run instead of tandem: the first argument picks one.
FAKE = """
import os, signal, sys, time
from tandem.shared.node import lifeline
from tandem.shared.node.lifeline import announce, follow_launcher
what = sys.argv[1]
if what == "fails":
    sys.exit("tandem: no memory; buy some")
if what == "misled":
    print("tandem: --colour is not an option", file=sys.stderr)
    sys.exit(2)
if what == "speechless":
    sys.exit(3)
if what == "drains":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
if what == "stubborn":
    lifeline.GRACE_SECONDS = 0.1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what != "slow":
    follow_launcher()
    announce({"address": "a:1", "key": os.environ.get("SECRET")})
if what == "brief":
    sys.exit("tandem: it was too much")
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
def cluster(tmp_path: Path, package: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "logs", os.environ | {"PYTHONPATH": str(package)})
    yield made
    made.stop()


def soon() -> float:
    return time.monotonic() + 30


def test_a_part_announces_itself_and_ends_when_told(cluster: Cluster, tmp_path: Path) -> None:
    part = cluster.start("one", ["serves"], SECRET="s3")
    assert cluster.wait_ready(part, soon()) == {"address": "a:1", "key": "s3"}
    assert "s3" not in psutil.Process(part.process.pid).cmdline()
    cluster.check()
    assert (tmp_path / "logs" / "one.log").is_file()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fails", StartupError, "one ended with exit status 1: no memory; buy some .*one.log"),
        ("misled", UsageError, "one ended with exit status 2: --colour is not an option"),
        ("speechless", StartupError, "one ended with exit status 3: it said nothing"),
    ],
)
def test_a_part_that_cannot_start_has_the_last_word(
    cluster: Cluster, what: str, error: type[Exception], words: str
) -> None:
    part = cluster.start("one", [what])
    with pytest.raises(error, match=words):
        cluster.wait_ready(part, soon())


def test_waiting_for_one_part_notices_the_end_of_another(cluster: Cluster) -> None:
    slow = cluster.start("slow", ["slow"])
    cluster.start("two", ["fails"])
    with pytest.raises(StartupError, match="two ended with exit status 1: no memory"):
        cluster.wait_ready(slow, soon())


def test_a_part_that_is_too_slow_is_named_with_its_log(cluster: Cluster) -> None:
    part = cluster.start("slow", ["slow"])
    with pytest.raises(
        StartupError, match=r"slow is not ready in time; .*--start-timeout.*slow.log"
    ):
        cluster.wait_ready(part, time.monotonic())


def test_a_part_that_ends_while_serving_is_an_error(cluster: Cluster) -> None:
    cluster.wait_ready(cluster.start("one", ["brief"]), soon())
    with pytest.raises(StartupError, match="one ended with exit status 1: it was too much"):
        cluster.wait()


def test_a_part_that_ignores_its_end_is_killed(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.node.launch.STOP_SECONDS", 0.5)
    cluster = Cluster(tmp_path / "logs", os.environ | {"PYTHONPATH": str(package)})
    part = cluster.start("one", ["stubborn"])
    try:
        cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    assert part.process.returncode == -signal.SIGKILL


def test_a_part_has_its_own_time_to_drain(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.shared.node.launch.STOP_SECONDS", 0.1)
    cluster = Cluster(tmp_path / "logs", os.environ | {"PYTHONPATH": str(package)}, 30.0)
    part = cluster.start("one", ["drains"])
    try:
        cluster.wait_ready(part, soon())
    finally:
        cluster.stop()
    assert part.process.returncode == 0


def test_whoever_does_not_wait_for_the_end_cuts_off_what_runs(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path / "logs", os.environ | {"PYTHONPATH": str(package)})
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
    cluster = Cluster(Path("/proc/no"), os.environ)
    try:
        with pytest.raises(StartupError, match=r"cannot write logs to /proc/no.*--log-dir"):
            cluster.start("one", ["serves"])
    finally:
        cluster.stop()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from tandem.shared.node.launch import Cluster
cluster = Cluster(Path(sys.argv[1]), os.environ)
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
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "logs"), what],
        env=os.environ | {"PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        part = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        until(lambda: not part.is_running() or part.status() == "zombie", "the part to end", 30)
