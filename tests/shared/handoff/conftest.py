"""What the tests of the data plane have in common."""

from __future__ import annotations

from typing import Any

import pytest

from .plane_pair import Rank


@pytest.fixture(params=["tcp", "shared_memory"])
def each_carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The test runs once over each carrier; fake peers speak TCP, so ranks may fall back to it."""
    monkeypatch.setattr(Rank, "carrier", request.param if request.param == "tcp" else "auto")
    return request.param
