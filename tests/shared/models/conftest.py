"""Tiny checkpoints of every family, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.tests.support.checkpoints import tiny_models


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=sorted({*tiny_models.MODELS, *tiny_models.WRAPPED}))
def folder(request: pytest.FixtureRequest, model_root: Path) -> Path:
    """A model of every kind."""
    return tiny_models.cached(request.param, model_root)


@pytest.fixture(scope="module", params=sorted(tiny_models.MODELS))
def text_folder(request: pytest.FixtureRequest, model_root: Path) -> Path:
    """A model of every kind of text model."""
    return tiny_models.cached(request.param, model_root)


# What the others are made of: kinds of attention, experts, windows and rope.
COMMON = (
    *("llama", "llama_bias", "qwen2", "qwen3", "qwen3_moe_mixed", "phi3_partial", "gemma2"),
    *("gemma3_linear", "smollm3", "deepseek_v2_groups", "deepseek_v3", "gpt_oss", "phi"),
)


@pytest.fixture(params=COMMON)
def common_folder(request: pytest.FixtureRequest, model_root: Path) -> Path:
    """A model of the most common kinds, for what does not depend on the kind."""
    return tiny_models.cached(request.param, model_root)
