"""Scaled frequencies are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.shared.models.config import Config, read_rope
from tandem.shared.models.rope import Rope

LONG = {"factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "table",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {**LONG, "rope_theta": 1e6, "beta_fast": 64, "beta_slow": 2},
        {**LONG, "mscale": 1.0, "mscale_all_dim": 0.707},
        {**LONG, "mscale": 0.707, "truncate": False},
        {**LONG, "attention_factor": 1.3},
        # No frequency is between the ends of the ramp.
        {"factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 1.0},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_yarn(table: dict[str, Any], head_dim: int) -> None:
    values = {"rope_theta": 1e4, "rope_type": "yarn", **table}
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=8192, rope_parameters=dict(values)
    )
    expected, gain = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    config = Config({"rope_parameters": values, "max_position_embeddings": 8192})
    rope = Rope(read_rope(config, head_dim), torch.device("cpu"))
    torch.testing.assert_close(rope.frequencies, expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(gain)
    cos, sin = rope.cos_sin(torch.tensor([0, 3]))
    torch.testing.assert_close(cos[1, 0], gain * (3 * expected).cos().repeat(2))
    torch.testing.assert_close(sin[1, 0, head_dim // 2 :], gain * (3 * expected).sin())
