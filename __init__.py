"""Tandem: an LLM server that runs prefill and decode apart.

The Python API::

    from tandem import Engine, EngineConfig, SamplingParams

    with Engine(EngineConfig(model="builtin")) as engine:
        print(engine.generate_sync(["Hello!"], SamplingParams(max_tokens=20))[0][0].text)

Names load on first use, so that ``import tandem`` costs nothing and a router never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .shared.config import EngineConfig
    from .shared.engine.api.engine import Engine
    from .shared.engine.api.types import (
        Classification,
        Completion,
        Delta,
        Embedding,
        Message,
        Score,
    )
    from .shared.engine.sampling_params import SamplingParams
    from .shared.engine.structured.params import StructuredOutputs
    from .shared.engine.structured.thinking_budget import ThinkingBudget

__version__ = "0.1.0"

_HOMES = {
    "Classification": "shared.engine.api.types",
    "Completion": "shared.engine.api.types",
    "Delta": "shared.engine.api.types",
    "Embedding": "shared.engine.api.types",
    "Engine": "shared.engine.api.engine",
    "EngineConfig": "shared.config",
    "Message": "shared.engine.api.types",
    "SamplingParams": "shared.engine.sampling_params",
    "Score": "shared.engine.api.types",
    "StructuredOutputs": "shared.engine.structured.params",
    "ThinkingBudget": "shared.engine.structured.thinking_budget",
}

__all__ = [
    "Classification",
    "Completion",
    "Delta",
    "Embedding",
    "Engine",
    "EngineConfig",
    "Message",
    "SamplingParams",
    "Score",
    "StructuredOutputs",
    "ThinkingBudget",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
