"""What the tests of the data plane have in common."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from .plane_pair import Rank

# Fake peers speak TCP, so ranks may fall back to it.
CARRIERS = {"tcp": "tcp", "shared_memory": "auto", "cuda_ipc": "cuda_ipc,tcp"}
WITH_NIXL = CARRIERS | ({"nixl": "nixl,tcp"} if importlib.util.find_spec("nixl") else {})


@pytest.fixture(params=CARRIERS)
def each_carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The test runs once over each carrier that needs nothing installed."""
    monkeypatch.setattr(Rank, "carrier", CARRIERS[request.param])
    return request.param


@pytest.fixture(params=WITH_NIXL)
def every_carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """NIXL as well, where it is installed; it adds about a second to a test."""
    monkeypatch.setattr(Rank, "carrier", WITH_NIXL[request.param])
    return request.param
