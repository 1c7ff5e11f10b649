"""Claims to a GPU, by a UUID that no GPU has."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tandem.kernels import streams
from tandem.shared.engine.messages import OpenDevice
from tandem.shared.engine.rank import device_claim, process
from tandem.shared.engine.rank.device_claim import claim, lock
from tandem.shared.errors import StartupError
from tandem.tests.support.fake_cuda import settings

UUID = "f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"
HOLDER = f"""
from tandem.shared.engine.rank.device_claim import lock
lock({UUID!r}, "GPU 0", shared=False)
print("locked", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def take(uuid: str, name: str, *, shared: bool, seconds: float = 5.0) -> int:
    file = lock(uuid, name, shared=shared, seconds=seconds)
    assert file is not None
    return file


def test_a_gpu_has_one_node_unless_all_of_its_nodes_share_it() -> None:
    alone = take(UUID, "GPU 3", shared=False)
    other = take(UUID[::-1], "GPU 4", shared=False)
    remedy = (
        rf"GPU 3 \({UUID}\) is used by another node: .* --d, .*--nodes-per-device 2 .*--share-d"
    )
    with pytest.raises(StartupError, match=remedy):
        take(UUID, "GPU 3", shared=False, seconds=0)
    with pytest.raises(StartupError, match="a node that does not share it"):
        take(UUID, "GPU 3", shared=True, seconds=0)
    os.close(alone)
    shared = [take(UUID, "GPU 3", shared=True, seconds=0) for _ in range(3)]
    with pytest.raises(StartupError, match="used by another node"):
        take(UUID, "GPU 3", shared=False, seconds=0)
    for each in (*shared, other):
        os.close(each)
    os.close(take(UUID, "GPU 3", shared=False, seconds=0))


def test_a_claim_ends_with_its_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(StartupError):
            take(UUID, "GPU 0", shared=False, seconds=0)
        process.kill()
        os.close(take(UUID, "GPU 0", shared=False))  # waits for the end of a killed node


def test_only_gpus_are_claimed_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert claim(torch.device("cpu"), shared=False) is None
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID)
    )
    first = claim(torch.device("cuda", 1), shared=False)
    assert first is not None
    with pytest.raises(StartupError, match="GPU 1"):
        take(UUID, "GPU 1", shared=False, seconds=0)
    os.close(first)


@pytest.mark.usefixtures("cuda")
def test_a_rank_claims_its_gpu_when_it_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID)
    )
    monkeypatch.setattr(device_claim, "lock", partial(lock, seconds=0))
    monkeypatch.setattr(process, "setup_logging", Mock())
    monkeypatch.setattr(streams, "use_compute_stream", Mock())
    other = take(UUID, "GPU 1", shared=True)
    rank = process.RankProcess(channel=Mock())
    with pytest.raises(StartupError, match=rf"GPU 1 \({UUID}\) is used by another node"):
        rank._open(OpenDevice(settings("cuda", 1)))
    rank._open(OpenDevice(settings("cuda", 1, shares_device=True)))
    os.close(other)
    with pytest.raises(StartupError, match="GPU 1"):
        take(UUID, "GPU 1", shared=False, seconds=0)
    assert rank._claim is not None
    os.close(rank._claim)


def test_without_a_folder_for_locks_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(device_claim, "private_folder", lambda: tmp_path / "none")
    assert lock(UUID, "GPU 2", shared=False) is None
    assert "GPU 2 is not claimed" in caplog.text
