"""GGUF files of EmbeddingGemma, against transformers with the folders that they were made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tandem import Engine, EngineConfig
from tandem.shared.errors import ModelError
from tandem.shared.weights.source import read_spec
from tandem.tests.shared.models.test_encoders import expected, prompts, with_projections
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import add_tensor, write_gguf

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("models") / "model"
    tiny_models.build("embedding_gemma", result, query_pre_attn_scalar=16)  # the width of a head
    return result


@pytest.fixture(scope="module")
def projections(folder: Path) -> list[torch.Tensor]:
    """The weights of the linear layers in the folder."""
    return with_projections(folder)


def converted(
    folder: Path,
    file: Path,
    layers: list[torch.Tensor],
    *,
    kind: str = "F32",  # of the linear layers
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    as_list: bool = False,
) -> Path:
    """A file as llama.cpp's converter writes it, with the linear layers over a vector."""

    def change(writer: gguf.GGUFWriter) -> None:
        kinds = [True, True, False]
        writer.add_sliding_window_pattern(kinds if as_list else 3)
        if pooling is not None:
            writer.add_pooling_type(pooling)
        for name, layer in zip(("dense_2", "dense_3"), layers, strict=False):
            writer.add_dense_features_dims(name, layer.shape[1], layer.shape[0])
            add_tensor(writer, f"{name}.weight", layer.numpy(), kind)

    architecture = gguf.MODEL_ARCH.GEMMA_EMBEDDING
    return write_gguf(folder, file, change=change, architecture=architecture)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_file_embeds_as_its_folder(
    folder: Path, projections: list[torch.Tensor], tmp_path: Path, count: int, as_list: bool
) -> None:
    """With as many of the linear layers as it has. Prompts are longer than the window."""
    layers = projections[:count]
    file = converted(folder, tmp_path / "model.gguf", layers, as_list=as_list)
    with Engine(EngineConfig(model=str(file), dtype="float32", threads=1)) as engine:
        vectors = engine.embed(prompts())
    for vector, states in zip(vectors, expected(folder), strict=True):
        reference = states.mean(0)
        for layer in layers:
            reference = layer @ reference
        np.testing.assert_allclose(vector.values, reference / reference.norm(), atol=1e-5)


def test_the_spec_is_that_of_the_folder(
    folder: Path, projections: list[torch.Tensor], tmp_path: Path
) -> None:
    file = converted(folder, tmp_path / "model.gguf", projections)
    result, reference = read_spec(file), read_spec(folder)
    assert result.embeds and result.vector_size == reference.vector_size == 24
    assert result.layers == reference.layers and result.projections == reference.projections
    cls = converted(folder, tmp_path / "cls.gguf", [], pooling=gguf.PoolingType.CLS)
    assert read_spec(cls).pooling == "cls"
    none = converted(folder, tmp_path / "none.gguf", [], pooling=None)
    assert read_spec(none).pooling == "mean" and not read_spec(none).embeds


def test_quantised_layers_over_a_vector_become_numbers(
    folder: Path, projections: list[torch.Tensor], tmp_path: Path
) -> None:
    file = converted(folder, tmp_path / "model.gguf", projections, kind="Q8_0")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    first, second = (
        torch.from_numpy(gguf.dequantize(gguf.quantize(layer.numpy(), q8_0), q8_0))
        for layer in projections
    )
    with Engine(EngineConfig(model=str(file), dtype="float32", threads=1)) as engine:
        vectors = engine.embed(prompts())
    for vector, states in zip(vectors, expected(folder), strict=True):
        reference = second @ (first @ states.mean(0))
        np.testing.assert_allclose(vector.values, reference / reference.norm(), atol=1e-5)


def test_a_layer_of_another_width_is_refused(folder: Path, tmp_path: Path) -> None:
    file = converted(folder, tmp_path / "model.gguf", [torch.zeros(8, 32)])
    with pytest.raises(ModelError, match=r"dense_modules\[0\]: in_features is 32; supported: 64"):
        read_spec(file)
