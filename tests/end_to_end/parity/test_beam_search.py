"""Beam search finds the sequences that transformers finds, wherever prompts are prefilled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import TestCluster
from tandem.tests.support.extent import selected

TOKENS = 6
OPTIONS: tuple[dict[str, Any], ...] = (
    {"n": 3},
    {"n": 2, "length_penalty": 0.0, "early_stopping": True},
    {"n": 4, "length_penalty": 2.0, "early_stopping": "never"},
)


@pytest.fixture(scope="module")
def model(tiny_model: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def reference(model: Any, tokens: list[int], end: int, options: dict[str, Any]) -> list[list[int]]:
    """The tokens of transformers for each beam, without padding."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            num_beams=options["n"],
            num_return_sequences=options["n"],
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=options.get("early_stopping", False),
        )
    beams = [beam[len(tokens) :] for beam in output.tolist()]
    return [beam[: beam.index(end) + 1] if end in beam else beam for beam in beams]


def check(cluster: TestCluster, model: Any, length: int) -> None:
    tokens = prompt(length, length)
    first = cluster.complete(tokens, n=4, use_beam_search=True, max_tokens=3, ignore_eos=True,
                             return_token_ids=True)  # fmt: skip
    end = first["choices"][1]["token_ids"][2]  # a token that some beam draws
    for options in OPTIONS:
        body = cluster.complete(
            tokens,
            use_beam_search=True,
            ignore_eos=True,
            stop_token_ids=[end],
            max_tokens=TOKENS,
            return_token_ids=True,
            **options,
        )
        outputs = [choice["token_ids"] for choice in body["choices"]]
        assert outputs == reference(model, tokens, end, options), options


def test_beams_are_those_of_transformers(aggregated: TestCluster, model: Any) -> None:
    check(aggregated, model, 40)


# What is drawn does not depend on how KV moves.
@pytest.mark.parametrize("disaggregated", selected(["shared_memory"], full=["tcp"]), indirect=True)
def test_beams_over_a_prompt_from_a_prefill_node(disaggregated: TestCluster, model: Any) -> None:
    check(disaggregated, model, 100)
