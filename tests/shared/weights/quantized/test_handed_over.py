"""A folder in bfloat16 and one that is quantised: one fingerprint, KV that passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.weights.source import open_source
from tandem.tests.shared.models.test_kv_formats import ratios
from tandem.tests.shared.weights.gguf.test_handed_over import fingerprint
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized
from tandem.tests.support.runners import build_runner


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 blocks", "fp8 tensor", "gptq 8", "gptq 8 zeros", "compressed w8a8", "int8"),
        *("gptq 4", "awq", "nf4 nested", "mlx 6", "mlx 4", "modelopt nvfp4", "compressed int4"),
        "mlx mxfp4",
    ],
)
def test_the_canary_allows_for_the_rounding_of_weights_and_for_no_other_weights(
    tmp_path: Path, deep: Path, senders: tuple[ModelRunner, ModelRunner], name: str
) -> None:
    quantized, _ = write_quantized(deep, tmp_path, METHODS[name])
    assert fingerprint(quantized) == fingerprint(deep)
    formats = open_source(quantized).block_formats()
    assert formats
    quantised = build_runner(quantized, dtype="bfloat16", block_size=4, num_blocks=24)
    same, other = ratios(senders, quantised, formats)
    assert same < 1 < other
