"""Families over two nodes: the prefill node has two ranks, the decode node one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import committed_transfers, running
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.extent import selected

OUTPUT = 8


def greedy(reference: Any, tokens: list[int]) -> list[int]:
    """The tokens of transformers."""
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([tokens]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
        )
    return list(output[0, len(tokens) :].tolist())


@pytest.mark.parametrize("name", selected(["gemma3"], full=["qwen3_moe", "phi3_partial"]))
def test_a_prompt_prefilled_elsewhere_continues_as_in_transformers(
    tmp_path: Path, name: str
) -> None:
    model = tiny_models.cached(name, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with running(tmp_path, str(model)) as cluster:
        cluster.start_router()
        _, decode = cluster.start_nodes(("prefill-node", "--tp=2"), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        for number, length in enumerate((40, 300)):
            tokens = prompt(number, length)
            body = cluster.complete(
                tokens, max_tokens=OUTPUT, temperature=0, ignore_eos=True, return_token_ids=True
            )
            assert body["choices"][0]["token_ids"] == greedy(reference, tokens)
            assert committed_transfers(decode) == number + 1
