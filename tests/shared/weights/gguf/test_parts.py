"""Models in several GGUF files: any part stands for all, and each is checked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from tandem.shared.errors import ModelError
from tandem.shared.weights.gguf import parts
from tandem.shared.weights.load import load_model
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import finish, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.cached("qwen3_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def split(folder: Path) -> list[Path]:
    """The parts of a model, whose experts are in several of them."""
    write_gguf(folder, folder / "split.gguf", "Q8_0", tensors_in_part=12)
    return sorted(folder.glob("split-*.gguf"))


@pytest.fixture
def copied(split: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(part, tmp_path)) for part in split]


def refusal(part: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_source(part).config()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_any_part_stands_for_the_model(folder: Path, split: list[Path]) -> None:
    whole = open_source(write_gguf(folder, folder / "whole.gguf", "Q8_0"))
    assert len(split) == 4
    for part in split:
        source = open_source(part)
        assert sorted(source.names()) == sorted(whole.names())
        assert source.weight_files() == [each.name for each in split]
        assert read_spec(part) == read_spec(whole.path)
        assert source.tokenizer_files().tokenizer == whole.tokenizer_files().tokenizer
        with source, whole:
            for name in whole.names():
                rows = whole.shape(name)[0]
                expected = whole.read(name, 0, 0, rows)
                assert torch.equal(source.read(name, 0, 0, rows), expected)
    assert load_model(split[-1])


def test_a_missing_part_is_named(copied: list[Path]) -> None:
    for missing in (0, 1, 3):
        part = copied[missing]
        content = part.read_bytes()
        part.unlink()
        values = copied[2]
        assert refusal(values) == (
            f"{part} is missing, one of the 4 files of this model; download it too"
        )
        part.write_bytes(content)


def test_a_part_that_is_cut_is_named(copied: list[Path]) -> None:
    copied[2].write_bytes(copied[2].read_bytes()[:-40])
    assert refusal(copied[0]).startswith(f"{copied[2]} is truncated: ")


def test_a_part_under_another_name(copied: list[Path]) -> None:
    other = copied[0].with_name("model.gguf")
    shutil.copy(copied[0], other)
    assert "has split.count 4, but is not named like a part" in refusal(other)
    shutil.copy(copied[1], copied[2])
    assert refusal(copied[0]) == (
        f"{copied[2]} has split.no 1 and split.count 4, but by its name 2 and 4: it belongs to "
        f"another model, or was renamed"
    )


def rewritten(file: Path, name: str, change: Callable[[gguf.GGUFWriter], None]) -> None:
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_uint16("split.count", 4)
    change(writer)
    writer.add_tensor(name, torch.ones(4).numpy())
    finish(writer)


def test_parts_of_several_models(copied: list[Path]) -> None:
    rewritten(copied[3], "other.weight", lambda writer: writer.add_uint16("split.no", 3))
    message = refusal(copied[0])
    assert "has split.tensors.count " in message and "download all of them again" in message
    rewritten(copied[3], "token_embd.weight", lambda writer: writer.add_uint16("split.no", 3))
    error_text = refusal(copied[0])
    assert error_text.startswith(
        f"{copied[3]} has tensor token_embd.weight, as has an earlier part"
    )
    rewritten(copied[3], "a.weight", lambda writer: writer.add_string("split.no", "3"))
    assert "has split.no '3' and split.count 4" in refusal(copied[0])


def test_all_parts_have_one_limit(split: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_MATRICES", 40)
    assert "the model has more than 40 matrices" in refusal(split[0])


def test_files_of_a_model_by_the_name_of_one() -> None:
    def named(name: str) -> list[str]:
        return [each.name for each in parts.part_files(Path("x") / name)]

    assert named("m.gguf") == ["m.gguf"]
    assert named("m-00002-of-00002.GGUF") == ["m-00001-of-00002.GGUF", "m-00002-of-00002.GGUF"]
    assert named("m-2-of-2.gguf") == ["m-2-of-2.gguf"]
    assert named("m-00001-of-00001.gguf") == ["m-00001-of-00001.gguf"]
