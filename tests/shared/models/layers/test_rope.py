"""Scaled frequencies are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.shared.models.config import Config, read_rope
from tandem.shared.models.layers.rope import Rope

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
        # As DeepSeek-R1-0528-Qwen3-8B has it.
        {**LONG, "attn_factor": 0.73, "extrapolation_factor": 1.0},
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


@pytest.mark.parametrize(("limit", "factors"), [(None, "long"), (4097, "long"), (4096, "short")])
@pytest.mark.parametrize("part", [1.0, 0.75])
def test_longrope(limit: int | None, factors: str, part: float) -> None:
    """The factors are chosen by the longest context, not by the sequence."""
    count = int(16 * part) // 2
    short, long = ([1.0 + step * i for i in range(count)] for step in (0.1, 1.5))
    values = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": part}
    values |= {"short_factor": short, "long_factor": long}
    limits: dict[str, Any] = {
        "max_position_embeddings": 65536,
        "original_max_position_embeddings": 4096,
    }
    theirs = transformers.Phi3Config(
        hidden_size=64, num_attention_heads=4, rope_parameters=dict(values), **limits
    )
    length = 5000 if factors == "long" else 1
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=length)
    config = Config({"rope_parameters": values, **limits}, max_model_len=limit)
    rope = Rope(read_rope(config, 16, partial=True), torch.device("cpu"))
    torch.testing.assert_close(rope.frequencies, expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)
    assert rope.cos_sin(torch.tensor([0, 3]))[0].shape == (2, 1, 2 * count)


@pytest.mark.parametrize("limit", [None, 1000, 4096, 8192, 12000])
def test_dynamic(limit: int | None) -> None:
    """Theta is that of the longest context, as of a sequence of that length in transformers."""
    values = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    theirs = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=4096, rope_parameters=dict(values)
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=limit)
    config = Config(
        {"rope_parameters": values, "max_position_embeddings": 4096}, max_model_len=limit
    )
    rope = Rope(read_rope(config, 64), torch.device("cpu"))
    torch.testing.assert_close(rope.frequencies, expected, rtol=1e-6, atol=0)


def test_a_table_has_the_same_numbers() -> None:
    """Also once it has grown, and where cos and sin have a factor."""
    table = {"rope_theta": 1e4, "rope_type": "yarn", **LONG}
    config = Config({"rope_parameters": table, "max_position_embeddings": 8192})
    rope = Rope(read_rope(config, 16), torch.device("cpu"))
    assert rope.attention_factor > 1
    for positions in ([0], [5, 3], [1023, 7], [5000, 0, 2999], [4]):
        rows = torch.tensor(positions)
        result = rope.cos_sin_below(rows, max(positions) + 1)
        for entries, computed in zip(result, rope.cos_sin(rows), strict=True):
            assert entries.is_contiguous() and entries.equal(computed)


def test_a_table_of_all_positions_has_the_same_numbers() -> None:
    """Each in one piece, as kernels read them; too many positions are computed in each step."""
    table = {"rope_theta": 1e4, "rope_type": "yarn", **LONG}
    spec = read_rope(Config({"rope_parameters": table, "max_position_embeddings": 8192}), 16)
    cpu, rows = torch.device("cpu"), torch.tensor([7, 0, 8191])
    for positions in (8192, 1 << 30):
        result = Rope(spec, cpu, positions).cos_sin(rows)
        for entries, computed in zip(result, Rope(spec, cpu).cos_sin(rows), strict=True):
            assert entries.is_contiguous() and entries.equal(computed)


def test_without_a_spec_nothing_is_rotated() -> None:
    cos, sin = Rope(None, torch.device("cpu")).cos_sin(torch.tensor([0, 3]))
    assert cos.shape == sin.shape == (2, 1, 0)
