"""A published model with its own weights, apart, against transformers: token for token.

Only where ``REAL_MODEL`` names a folder in Hugging Face layout. docs/testing.md has how one of
135 M parameters comes from a package index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.shared.models.spec import tensor_parallel_problem
from tandem.shared.weights.source import read_spec
from tandem.tests.end_to_end.support.cluster import TestCluster, committed_transfers, running
from tandem.tests.end_to_end.support.questions import QUESTIONS, assert_outputs, messages

MODEL = os.environ.get("REAL_MODEL", "")
pytestmark = [
    pytest.mark.asked_for("REAL_MODEL"),
    pytest.mark.timeout(900),
]
TOKENS = 12


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The outputs of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts = []
    for question in QUESTIONS:
        inputs: Any = tokenizer.apply_chat_template(
            messages(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        sequence = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0]
        output = sequence[inputs["input_ids"].shape[1] :]
        texts.append(str(tokenizer.decode(output, skip_special_tokens=True)))
    return texts


@pytest.fixture(scope="module", params=[1, 3], ids=["one rank", "three ranks"])
def apart(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestCluster]:
    """Prefill by so many ranks; decoding by one. Three KV heads do not divide by two."""
    if problem := tensor_parallel_problem(read_spec(MODEL), request.param):
        pytest.skip(problem)
    with running(tmp_path_factory.mktemp("real"), MODEL) as cluster:
        cluster.start_router()
        cluster.start_nodes(("prefill-node", f"--tp={request.param}"), ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=1)
        yield cluster
        assert committed_transfers(cluster.parts[-1]) >= len(QUESTIONS)


def test_outputs_equal_those_of_transformers(apart: TestCluster, expected: list[str]) -> None:
    assert_outputs(apart, TOKENS, expected)
