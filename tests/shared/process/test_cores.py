"""Ranks on one machine share its cores."""

from __future__ import annotations

import os

import pytest

from tandem.shared.process.cores import share_of_cores


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (2, 8), (3, 5), (16, 1), (40, 1)])
def test_each_rank_gets_its_share_and_never_none(
    ranks: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert share_of_cores(ranks) == each
