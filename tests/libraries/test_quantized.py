"""Matrices as the libraries of formats write them are read as those libraries read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.kernels.quantized import QuantizedWeight
from tandem.shared.weights.source import open_source
from tandem.tests.libraries.records import read_record

CASES = {
    "compressed-tensors": 12,
    "compressed-tensors-groups": 2,
    "gptqmodel": 9,
    "autoawq": 2,
    "bitsandbytes": 5,
    "mlx": 8,
}
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("library", CASES)
def test_a_matrix_is_read_as_its_library_reads_it(library: str, tmp_path: Path) -> None:
    """To the last bit of the dtype that the library decodes to."""
    tensors, about = read_record(library)
    assert len(about["configs"]) == CASES[library]
    for number, (case, config) in enumerate(about["configs"].items()):
        own = {
            name.removeprefix(f"{case}:"): each
            for name, each in tensors.items()
            if name.startswith(f"{case}:")
        }
        expected = own.pop("decoded")
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        key = "quantization" if library == "mlx" else "quantization_config"
        values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", key: config}
        (folder / "config.json").write_text(json.dumps(values))
        with open_source(folder) as source:
            assert source.names() == [NAME] and source.shape(NAME) == tuple(expected.shape)
            format = source.block_format(NAME)
            assert format is not None
            blocks = source.read(NAME, 0, 0, len(expected))
            result = QuantizedWeight(format, blocks, source.order(NAME)).values().to(expected.dtype)
        # bitsandbytes divides by 127 last.
        tolerance = 2e-7 if case == "int8" else 0
        torch.testing.assert_close(
            result, expected, rtol=tolerance, atol=0, msg=f"{library}: {case}"
        )
