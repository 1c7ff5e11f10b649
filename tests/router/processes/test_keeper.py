"""What a keeper needs of its machine, and tells if it is missing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tandem.router.options import RouterOptions
from tandem.router.processes.keeper import MAX_FOLDER, Keeper
from tandem.router.processes.worker import share_of
from tandem.shared.errors import StartupError
from tandem.shared.security.credentials import INSECURE


@pytest.mark.parametrize("folder", ["missing", "l" * MAX_FOLDER])
async def test_a_folder_that_cannot_hold_sockets_is_reported(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    options = RouterOptions(port=0, registry_port=0, router_workers=2, drain_timeout=0.0)
    keeper = Keeper(options, lambda: None, INSECURE)
    with pytest.raises(StartupError, match="TMPDIR"):
        await keeper.start()
    await keeper.stop()


def test_limits_are_divided_among_workers_but_one_request_has_room() -> None:
    options = RouterOptions(
        router_workers=3, max_connections=10, max_body_bytes=5000, max_held_body_bytes=9000
    )
    share = share_of(options)
    assert (share.max_connections, share.max_held_body_bytes) == (4, 5000)
    assert share_of(RouterOptions(max_connections=10)).max_connections == 10
