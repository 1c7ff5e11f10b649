"""Fixtures of the data plane's tests."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

# Fake peers speak TCP, so ranks may fall back to it.
CARRIERS = {"tcp": "tcp", "shared_memory": "auto"}
ALL = CARRIERS | {"cuda_ipc": "cuda_ipc,tcp"}
if importlib.util.find_spec("nixl"):
    ALL["nixl"] = "nixl,tcp"


@pytest.fixture(params=CARRIERS)
def each_carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The test runs once over each carrier that needs neither a device nor a library."""
    return _carried(request.param, CARRIERS, monkeypatch)


@pytest.fixture(params=ALL)
def every_carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA IPC as well, over a fake driver, and NIXL where it is installed; that adds about a
    second to a test."""
    return _carried(request.param, ALL, monkeypatch)


def _carried(name: str, carriers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    # Not all machines with a GPU have what planes need, and not all tests here need a plane.
    from tandem.tests.shared.handoff.support.plane_pair import PlaneRank

    monkeypatch.setattr(PlaneRank, "carrier", carriers[name])
    return name
