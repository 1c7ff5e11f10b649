"""The token that ``tandem serve`` generates, and the commands that find it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.shared.config import SecurityConfig
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.security.local_token import (
    find_credentials,
    find_registry,
    find_router,
    find_token,
    make_token,
    token_file,
)

REGISTRY, URL = "127.0.0.1:8001", "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tokens; neither it nor the other one is this machine's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    return tmp_path / "tandem"


def test_a_token_is_found_by_its_address_as_long_as_its_launcher_lives(runtime: Path) -> None:
    with token_file(REGISTRY, "one", URL), token_file("[::1]:8002", "two", URL):
        assert [find_token(a) for a in (REGISTRY, "localhost:8001", "[::1]:8002")] == [
            *("one", "one", "two")
        ]
        assert not any(map(find_token, ("127.0.0.1:8002", "[::1]:8001", "127.0.0.2:8001")))
        modes = {entry.stat().st_mode & 0o777 for entry in runtime.iterdir()}
        assert (runtime.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    assert not find_token(REGISTRY)
    assert list(runtime.iterdir()) == []


def test_a_command_without_a_router_finds_the_one_that_runs_here(runtime: Path) -> None:
    assert find_router(REGISTRY) == REGISTRY, "none runs here"
    with token_file("127.0.0.1:41234", "one", URL):
        assert find_router(REGISTRY) == "127.0.0.1:41234"
        with token_file("[::1]:41235", "two", URL):
            pattern = r"--router: 127.0.0.1:41234 \(http.*8000\), \[::1\]:41235 "
            with pytest.raises(UsageError, match=pattern):
                find_router(REGISTRY)
            with token_file(REGISTRY, "three", URL):
                assert find_router(REGISTRY) == REGISTRY
        with token_file("127.0.0.1:41233", "one", URL):  # two routers on one port
            assert find_router("127.0.0.1:9") == find_router("x", URL) == "127.0.0.1:41233"
    (runtime / "127.0.0.1:7").write_text("of a launcher that was killed")
    (runtime / "notes").write_text("x")
    assert find_router(REGISTRY) == REGISTRY


@pytest.mark.parametrize(
    ("url", "registry"),
    [
        ("http://127.0.0.1:7001", "127.0.0.1:41234"),
        ("http://LOCALHOST:7001/v1", "127.0.0.1:41234"),
        ("http://[::1]:7002/", "[::1]:41235"),
        ("http://10.0.0.1", "127.0.0.1:41236"),
        # One that a launcher's name is only a part of, and that of another machine.
        ("http://127.0.0.1.evil.example:7001", "fallback:8001"),
        ("http://127.0.0.1:7001@evil.example:7001", "fallback:8001"),
        ("http://10.0.0.2", "fallback:8001"),
    ],
)
def test_of_several_routers_a_command_finds_the_one_at_its_url(url: str, registry: str) -> None:
    with (
        token_file("127.0.0.1:41234", "one", "http://127.0.0.1:7001"),
        token_file("[::1]:41235", "two", "http://[::1]:7002"),
        token_file("127.0.0.1:41236", "three", "http://10.0.0.1:80"),
        token_file("127.0.0.1:41237", "four", ""),  # of an older version
    ):
        assert find_router("fallback:8001", url) == registry
        with pytest.raises(UsageError, match="several routers"):
            find_router("localhost:8001", "http://localhost:7003")
        with token_file(REGISTRY, "five", URL):
            assert find_router("localhost:8001", "http://localhost:7003") == "localhost:8001"


def test_a_command_checks_its_credentials_before_it_looks_for_a_router() -> None:
    with token_file("127.0.0.1:41234", "one", URL), token_file("127.0.0.1:41235", "two", URL):
        with pytest.raises(UsageError, match="--tls-ca ca needs --tls-cert"):
            find_registry(SecurityConfig(tls_ca="ca"), None, REGISTRY)
        with pytest.raises(UsageError, match="several routers run here"):
            find_registry(SecurityConfig(), None, REGISTRY)
        with pytest.raises(UsageError, match="--router a:1,b:2 has several addresses"):
            find_registry(SecurityConfig(), "a:1,b:2", REGISTRY)
        registry, credentials = find_registry(SecurityConfig(), "127.0.0.1:41235", REGISTRY)
        assert (registry, credentials.token) == ("127.0.0.1:41235", "two")
    registry, credentials = find_registry(SecurityConfig(cluster_token="x"), None, REGISTRY)
    assert (registry, credentials.token) == (REGISTRY, "x")


@pytest.mark.parametrize("address", ["10.0.0.1:8001", "node:8001", "127.0.0.1/../x:1", "x"])
def test_a_generated_token_is_not_used_for_other_machines(address: str) -> None:
    with token_file(REGISTRY, "one", URL):
        assert find_token(address) == ""


def test_the_token_of_a_killed_launcher_is_ignored_and_removed(runtime: Path) -> None:
    script = (
        "from tandem.shared.security.local_token import token_file; import time\n"
        f"with token_file({REGISTRY!r}, 'old', ''):\n"
        "    print('left', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline()
        assert find_token(REGISTRY) == "old"
        launcher.send_signal(signal.SIGKILL)
    assert [entry.name for entry in runtime.iterdir()] == [REGISTRY]
    assert find_token(REGISTRY) == ""
    with token_file("127.0.0.1:8002", "new", URL):
        assert [entry.name for entry in runtime.iterdir()] == ["127.0.0.1:8002"]


def test_a_token_that_cannot_be_written_leaves_no_half_of_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"), token_file(REGISTRY, "one", URL):
        pytest.fail("it was not written")
    assert list(runtime.iterdir()) == []


def test_a_launcher_that_ends_leaves_the_token_of_its_successor(runtime: Path) -> None:
    with token_file(REGISTRY, "old", URL):
        successor = token_file(REGISTRY, "new", URL)
        successor.__enter__()
    assert find_token(REGISTRY) == "new"
    successor.__exit__(None, None, None)
    assert list(runtime.iterdir()) == []


def test_without_a_session_the_token_lies_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with token_file(REGISTRY, "one", URL):
        assert (tmp_path / "temp" / f"tandem-{os.geteuid()}" / REGISTRY).exists()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert find_token(REGISTRY) == "one"


@pytest.mark.parametrize("how", ["readable by others", "a link", "a file"])
def test_a_folder_that_another_may_have_made_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    folder, elsewhere = tmp_path / "temp" / f"tandem-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how == "a link":
        folder.symlink_to(elsewhere)
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o755)
        (folder / REGISTRY).write_text("planted")
    assert find_token(REGISTRY) == ""
    with pytest.raises(StartupError, match="XDG_RUNTIME_DIR"), token_file(REGISTRY, "one", URL):
        pass
    assert list(elsewhere.iterdir()) == []


def test_a_lock_without_a_token_takes_the_one_of_its_router(tmp_path: Path) -> None:
    token = make_token()
    with token_file(REGISTRY, token, URL):
        assert find_credentials(SecurityConfig(), [REGISTRY]).token == token
        assert find_credentials(SecurityConfig(cluster_token="given"), [REGISTRY]).token == "given"
        assert find_credentials(SecurityConfig(), []).token == ""
        assert find_credentials(SecurityConfig(), ["127.0.0.1:8002"]).token == ""
        assert token not in repr(find_credentials(SecurityConfig(), [REGISTRY]))
        with pytest.raises(UsageError, match=r"127\.0\.0\.1:8002 have different cluster tokens"):
            find_credentials(SecurityConfig(), [REGISTRY, "127.0.0.1:8002"])
