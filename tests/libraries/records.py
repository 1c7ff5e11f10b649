"""Records of public libraries, as ``python -m tandem.tests.libraries`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

RECORDS = Path(__file__).parent / "recorded"


def read_record(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a record, and what it says about them."""
    with safe_open(RECORDS / f"{name}.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
