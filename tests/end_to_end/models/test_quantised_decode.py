"""A prefill node with a model in bfloat16, and decode nodes with the same model in fewer bits: in
quantised files and folders, or quantised while it is loaded."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    Part,
    TestCluster,
    committed_transfers,
    node_metric,
    running,
)
from tandem.tests.end_to_end.support.two_forms import (
    FIELDS,
    Q4_K_M,
    SHAPE,
    assert_greedy,
    reference,
)
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import dequantised, write_gguf
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized

BATCH = [prompt(length, length) for length in (17, 65, 200)]
NAME = "--served-model-name=tiny"
# The prefill node computes in bfloat16: found 0.02, and 0.06 in situ, where six bits are rounded in
# another way. Over KV of the quantised weights it is 0.05 for Q8_0, and up to 1.3 in four bits.
LOSS = 0.1

# A model's path, flags, and the folder with its weights as numbers.
Quantised = tuple[Path, tuple[str, ...], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16", **SHAPE)
    return folder


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    """transformers' model with the prefill node's weights."""
    return reference(folder)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[TestCluster]:
    """A router, and a prefill node of two ranks."""
    with running(folder.parent, str(folder)) as cluster:
        cluster.start_router(f"--model={folder}", NAME)
        cluster.start_node("prefill-node", NAME, "--dtype=bfloat16", "--tensor-parallel-size=2")
        yield cluster


@contextmanager
def decoding(cluster: TestCluster, model: Path, *flags: str) -> Iterator[Part]:
    """The only decode node, with its own form of the model; idle at the end."""
    cluster.model = str(model)
    node = cluster.start_node("decode-node", NAME, *flags)
    cluster.wait_nodes(decode=1, prefill=1)
    try:
        yield node
        prefill = cluster.parts[1]
        cluster.wait_idle(prefill, node)
    finally:
        node.process.send_signal(signal.SIGTERM)
        node.process.wait(15)
    cluster.wait_nodes(decode=0, prefill=1)


def file(kind: str, others: dict[str, str] | None = None) -> Callable[[Path, Path], Quantised]:
    def write(folder: Path, root: Path) -> Quantised:
        checkpoint = write_gguf(folder, root / "model.gguf", kind, others=others)
        return checkpoint, (), dequantised(folder, checkpoint, root / "plain")

    return write


def quantised_folder(method: str) -> Callable[[Path, Path], Quantised]:
    def write(folder: Path, root: Path) -> Quantised:
        coded, plain = write_quantized(folder, root, METHODS[method])
        return coded, (), plain

    return write


def in_situ(folder: Path, root: Path) -> Quantised:
    """The numbers are those of the same formats in a file."""
    _, _, plain = file("Q4_0", {"blk.": "Q4_0", "output": "Q6_K"})(folder, root)
    return folder, ("--isq=q4_0",), plain


FORMS: dict[str, Callable[[Path, Path], Quantised]] = {
    "Q8_0": file("Q8_0"),
    "Q4_K_M": file("Q4_K", Q4_K_M),
    "FP8": quantised_folder("fp8 blocks"),
    "AWQ": quantised_folder("awq"),
    "--isq=q4_0": in_situ,
}


@pytest.mark.parametrize("form", FORMS)
def test_kv_of_bfloat16_weights_continues_over_quantised_ones(
    cluster: TestCluster, exact: Any, folder: Path, tmp_path: Path, form: str
) -> None:
    """As in transformers: whole blocks of the prompt by the one model, all else by the other."""
    model, flags, plain = FORMS[form](folder, tmp_path)
    rounded = reference(plain)
    with decoding(cluster, model, "--no-enable-prefix-caching", *flags) as node:
        choices = cluster.complete(BATCH, **FIELDS)["choices"]
        assert committed_transfers(node) == len(BATCH)
        assert node_metric(node, 'tandem_canaries_total{outcome="passed"}') == 1
    for tokens, choice in zip(BATCH, choices, strict=True):
        end = (len(tokens) - 1) // BLOCK * BLOCK
        assert_greedy(exact, rounded, tokens, end, choice, LOSS)


def test_a_repeated_prompt_gets_the_same_output(cluster: TestCluster, folder: Path) -> None:
    """The prefix cache has what was received the first time, and no more than that."""
    with decoding(cluster, folder, "--isq=q4_0", f"--prefill-threshold={BLOCK}") as decode:
        for text in (prompt(length, length) for length in (17, 31, 64, 205)):
            first, *repeated = (
                cluster.complete(text, **FIELDS | {"max_tokens": 12}) for _ in range(3)
            )
            want = first["choices"][0]
            for response in repeated:
                choice = response["choices"][0]
                assert choice["text"] == want["text"]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                    want["logprobs"]["token_logprobs"], abs=1e-3
                )
                assert response["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(text) - 17
        assert committed_transfers(decode) == 4
