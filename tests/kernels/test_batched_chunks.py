"""Whole models with one launch for the chunks of a step, as Triton interprets it. On a GPU,
test_on_device.py computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tandem.kernels.attention_metadata import AttentionConfig, SequenceMetadata, chunk_metadata
from tandem.kernels.operators import Operators
from tandem.shared.engine.plan import SequenceStep
from tandem.tests.support.batches import build_batch
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import build_runner

pytest.importorskip("triton")

from tandem.kernels.gpu.operators import GpuOperators

if torch.cuda.is_available():
    pytest.skip("Triton does not interpret here", allow_module_level=True)

from tandem.kernels.gpu import chunk_attention as kernels

# torch's products add in another order without AVX-512.
ATOL = 2e-5 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 1e-5


def test_of_each_chunk_there_are_its_rows_its_table_and_where_it_begins() -> None:
    cpu = torch.device("cpu")
    sequences = [
        SequenceMetadata(slice(0, 5), 4, [7, 3, 5, 99], 4),
        SequenceMetadata(slice(5, 6), 9, [1, 2, 6], 4),
        SequenceMetadata(slice(6, 8), 0, [8], 4),
    ]
    chunks = chunk_metadata(sequences, cpu)
    assert chunks is not None
    assert chunks.chunks.tolist() == [[0, 5, 0, 4], [6, 2, 1, 0]]
    assert chunks.tables.tolist() == [[7, 3, 5], [8, 0, 0]]
    assert (chunks.tables.dtype, chunks.block_size) == (torch.int32, 4)
    assert chunk_metadata(sequences[1:2], cpu) is None


class WithChunks(GpuOperators):
    """Operators of a GPU, of which a CPU has the kernel for chunks."""

    def prepare_batched_chunks(self, config: AttentionConfig) -> bool:
        return config.params.soft_cap is None or config.params.window is None


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "modernbert", "embedding_gemma"])
def test_a_model_gives_the_same_with_one_launch_for_its_chunks(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    """Also if only some of its layers have a kernel, as gemma2's without a window here."""
    kernel = Mock(side_effect=kernels.chunk_attention)
    monkeypatch.setattr(kernels, "chunk_attention", kernel)
    folder, states = tiny_models.cached(name, tmp_path), []
    for operators in (Operators(), WithChunks()):
        runner = build_runner(
            folder, dtype="float32", block_size=4, num_blocks=16, operators=operators
        )
        steps = [
            SequenceStep(0, list(range(5, 14)), 0, [7, 2, 9], True),
            SequenceStep(1, [3], 0, [1], True),
            SequenceStep(2, list(range(30, 35)), 0, [0, 4], True),
        ]
        with torch.inference_mode():
            batch = build_batch(steps, 4, torch.device("cpu"), list(range(15)))
            chunks = chunk_metadata(batch.attention.sequences, torch.device("cpu"))
            batch = batch._replace(attention=replace(batch.attention, chunks=chunks))
            states.append(runner.model.forward(batch, runner.cache.kv))
        all_batched = isinstance(operators, WithChunks) and name != "gemma2"
        assert runner.model.chunks_in_place == all_batched
    torch.testing.assert_close(*states, atol=ATOL, rtol=1e-5)
    layers = [layer.attention for layer in runner.model.layers]
    batched = [getattr(layer, "batched_chunks", False) for layer in layers]
    assert kernel.call_count == sum(batched) > 0
    assert all(batched) == (name != "gemma2")
