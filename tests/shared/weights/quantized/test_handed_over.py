"""A folder in bfloat16 and one that is quantised: one fingerprint, KV that passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.shared.weights.source import open_source
from tandem.tests.shared.models.test_kv_formats import CanaryOfRunners
from tandem.tests.shared.weights.gguf.test_handed_over import fingerprint
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.quantized_folders import METHODS, write_quantized
from tandem.tests.support.runners import build_runner

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 blocks", "fp8 tensor", "gptq 8", "gptq 8 zeros", "compressed w8a8", "int8"),
        *("gptq 4", "awq", "nf4 nested", "mlx 6", "mlx 4", "modelopt nvfp4"),
    ],
)
def test_the_canary_allows_for_the_rounding_of_weights_and_for_no_other_weights(
    tmp_path: Path, name: str
) -> None:
    for seed in (0, 1):
        tiny_models.build("qwen3", tmp_path / str(seed), seed=seed, dtype="bfloat16", **WIDE)
    coded, _ = write_quantized(tmp_path / "0", tmp_path, METHODS[name])
    assert fingerprint(coded) == fingerprint(tmp_path / "0")
    formats = open_source(coded).block_formats()
    assert formats
    same, other, quantised = (
        build_runner(path, dtype="bfloat16", block_size=size, num_blocks=24)
        for path, size in ((tmp_path / "0", 8), (tmp_path / "1", 8), (coded, 4))
    )
    ratios = []
    for sender in (same, other):
        canary = CanaryOfRunners(sender, quantised)
        canary.formats += formats
        ratios.append(canary.ratio())
    print(name, formats, ratios)
    assert ratios[0] < 1 < ratios[1]
