"""One model in two forms, exact and rounded, as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

# Rows are whole blocks of 256.
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
# As llama.cpp's Q4_K_M, which are mostly Q4_K: a part of these in six bits.
Q4_K_M = {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "blk.": "Q4_K", "output": "Q6_K"}
# Request fields that make outputs comparable.
FIELDS = {
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
    "return_token_ids": True,
}


def reference(folder: Path) -> Any:
    """transformers' model."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_greedy(
    exact: Any, rounded: Any, tokens: list[int], end: int, choice: dict[str, Any], loss: float
) -> None:
    """Assert that the log probabilities of a greedy answer are those of a prompt whose KV up to
    ``end`` is of the one model, and all else of the other, to within ``loss``."""
    output_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    cache = exact(torch.tensor([tokens[:end]]), use_cache=True).past_key_values if end else None
    rest = torch.tensor([tokens[end:] + output_ids[:-1]])
    logits = rounded(rest, past_key_values=cache, use_cache=True).logits[0, -len(output_ids) :]
    expected = logits.log_softmax(-1)
    output_logprobs = expected.gather(1, torch.tensor(output_ids)[:, None])[:, 0].tolist()
    assert logprobs == pytest.approx(output_logprobs, abs=loss)
    assert output_logprobs == pytest.approx(expected.amax(1).tolist(), abs=loss), (
        "other tokens are likelier"
    )
