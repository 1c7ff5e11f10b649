"""Folders in which nodes meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.decode_node.peering.peer import reachable
from tandem.shared.config import prefill_addresses
from tandem.shared.errors import StartupError, UsageError
from tandem.shared.unix_sockets import folder_of, kv_endpoint, reserved_folder


def test_a_folder_stands_beside_addresses() -> None:
    setting = "10.0.0.7:8100, file:///run/tandem/ ,file:///with%20space"
    expected = ("10.0.0.7:8100", "unix:/run/tandem/control.sock", "unix:/with space/control.sock")
    assert prefill_addresses(setting) == expected
    assert [folder_of(address) for address in expected] == ["", "/run/tandem", "/with space"]
    assert prefill_addresses(None) == ()


@pytest.mark.parametrize("url", ["file://", "file://host/run", "file://run", "file:///" + "x" * 90])
def test_an_unsuitable_folder_for_sockets_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--pd-url"):
        prefill_addresses(url)


def test_each_side_calls_the_folder_by_its_own_name() -> None:
    endpoint = kv_endpoint("/volume/there", 3, "bulk")
    assert reachable(endpoint, "unix:/mnt/here/control.sock") == "ipc:///mnt/here/kv-3-bulk.sock"


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("ipc:///run/docker.sock", "unix:/run/tandem/control.sock"),
        ("ipc:///run/tandem/../kv.sock", "unix:/run/tandem/control.sock"),
        ("ipc:///kv-1-bulk.sock/..", "unix:/run/tandem/control.sock"),
        ("tcp://10.0.0.7:5", "unix:/run/tandem/control.sock"),
        ("ipc:///run/tandem/kv-0-bulk.sock", "10.0.0.7:8100"),
        ("inproc://x", "10.0.0.7:8100"),
        ("tcp://10.0.0.7", "10.0.0.7:8100"),
    ],
)
def test_a_node_cannot_point_at_other_sockets(endpoint: str, address: str) -> None:
    with pytest.raises(ValueError, match="is n"):
        reachable(endpoint, address)


def test_a_folder_has_one_listener_and_is_left_clean(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/control.sock"
    (tmp_path / "a file of others").touch()
    with reserved_folder(address):
        (tmp_path / "control.sock").touch()
        (tmp_path / "kv-0-bulk.sock").touch()
        with (
            pytest.raises(StartupError, match="another prefill node listens"),
            reserved_folder(address),
        ):
            pass
    with reserved_folder(address):
        assert {entry.name for entry in tmp_path.iterdir()} == {"a file of others", "prefill.lock"}
    nowhere = reserved_folder("unix:/nowhere/at/all/control.sock")
    with (
        pytest.raises(StartupError, match="this user must be able to write to the folder"),
        nowhere,
    ):
        pass
    with reserved_folder("127.0.0.1:8100"):
        pass
