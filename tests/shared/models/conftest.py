"""Tiny checkpoints of every family, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.tests.support.checkpoints import tiny_models


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=sorted(tiny_models.MODELS))
def folder(request: pytest.FixtureRequest, model_root: Path) -> Path:
    return tiny_models.cached(request.param, model_root)
