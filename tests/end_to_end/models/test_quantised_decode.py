"""A prefill node with a model in bfloat16, and a decode node with a quantised file of it, or one
that quantises it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    BLOCK,
    committed_transfers,
    node_metric,
    running,
)
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf

BATCH = [prompt(length, length) for length in (17, 65, 200)]
FIELDS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.mark.parametrize("options", [(), ("--isq=q4_0",)])
def test_kv_of_bfloat16_weights_continues_over_quantised_ones(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16")
    file = folder if options else write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    with running(tmp_path, str(folder)) as cluster:
        cluster.start_router(f"--model={folder}", "--served-model-name=tiny")
        cluster.model = str(file)
        decode = cluster.start_node(
            "decode-node", "--served-model-name=tiny", "--no-enable-prefix-caching", *options
        )
        cluster.wait_nodes(decode=1, prefill=0)
        want = cluster.complete(BATCH, **FIELDS)["choices"]
        cluster.model = str(folder)
        prefill = cluster.start_node(
            "prefill-node", "--served-model-name=tiny", "--tensor-parallel-size=2"
        )
        cluster.wait_nodes(decode=1, prefill=1)
        before = committed_transfers(decode)
        got = cluster.complete(BATCH, **FIELDS)["choices"]
        assert committed_transfers(decode) - before == len(BATCH)
        assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') == 1
        for one, other in zip(want, got, strict=True):
            first, second = (c["logprobs"]["token_logprobs"][0] for c in (one, other))
            assert first == pytest.approx(second, abs=0.5)
        cluster.wait_idle(prefill, decode)


def test_a_repeated_prompt_gets_the_same_answer(tmp_path: Path) -> None:
    """The prefix cache has what was received the first time, and no more than that."""
    folder = tmp_path / "model"
    tiny_models.build("qwen3", folder, dtype="bfloat16")
    with running(tmp_path, str(folder)) as cluster:
        cluster.start_router(f"--model={folder}", "--served-model-name=tiny")
        decode, _ = cluster.start_nodes(
            (
                "decode-node",
                "--served-model-name=tiny",
                "--isq=q4_0",
                f"--prefill-threshold={BLOCK}",
            ),
            ("prefill-node", "--served-model-name=tiny"),
        )
        cluster.wait_nodes(decode=1, prefill=1)
        for text in (prompt(length, length) for length in (17, 31, 64, 205)):
            first, *repeated = (
                cluster.complete(text, **FIELDS | {"max_tokens": 12}) for _ in range(3)
            )
            want = first["choices"][0]
            for answer in repeated:
                got = answer["choices"][0]
                assert got["text"] == want["text"]
                assert got["logprobs"]["token_logprobs"] == pytest.approx(
                    want["logprobs"]["token_logprobs"], abs=1e-3
                )
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(text) - 17
        assert committed_transfers(decode) == 4
        cluster.wait_idle(decode)
