"""The options that choose a model become one name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.part_command import part_command
from tandem.commands.spellings import translate
from tandem.shared.config import EngineConfig, HubConfig
from tandem.shared.errors import UsageError

REPOSITORY = "Qwen/Qwen3-0.6B-GGUF"


def values_of(*arguments: str, **environment: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    command = part_command("part", values.update, EngineConfig)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        command.main(list(arguments), standalone_mode=False)
    return values


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (f"{REPOSITORY} --f m.gguf", f"{REPOSITORY}:m.gguf"),
        (f"--m {REPOSITORY} --f m.gguf --revision v1", f"{REPOSITORY}:m.gguf@v1"),
        (f"--hf-repo {REPOSITORY} --hf-file m.gguf", f"{REPOSITORY}:m.gguf"),
        (f"-hf {REPOSITORY}:Q4_K_M", f"{REPOSITORY}:Q4_K_M"),
        (f"{REPOSITORY} --modelscope", f"modelscope:{REPOSITORY}"),
        (f"{REPOSITORY}@v1", f"{REPOSITORY}@v1"),
        ("--f folder/m.gguf", "folder/m.gguf"),
        ("", "builtin"),
    ],
)
def test_the_options_of_a_version_are_in_the_name(arguments: str, name: str) -> None:
    values = values_of(*arguments.split())
    assert values["model"] == name
    assert not {"revision", "weight_file", "hf_token", "modelscope"} & set(values)


def test_a_file_of_a_folder_is_a_model(tmp_path: Path) -> None:
    values = values_of(f"--w={tmp_path}", "--f", "m.gguf")
    assert values["model"] == str(tmp_path / "m.gguf")


def test_a_file_on_the_command_line_counts_more_than_a_model_in_the_environment() -> None:
    assert values_of("--f", "m.gguf", TANDEM_MODEL="builtin")["model"] == "m.gguf"
    both = values_of(TANDEM_MODEL=REPOSITORY, TANDEM_WEIGHT_FILE="m.gguf")
    assert both["model"] == f"{REPOSITORY}:m.gguf"
    assert values_of(REPOSITORY, VLLM_USE_MODELSCOPE="True")["model"] == f"modelscope:{REPOSITORY}"


def test_a_token_goes_into_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_file\n")
    for argument, token in (
        ("--hf-token=hf_abc", "hf_abc"),
        ("--hf-token=MY_TOKEN", "hf_mine"),
        (f"--hf-token-path={tmp_path / 'token'}", "hf_file"),
    ):
        monkeypatch.setenv("HF_TOKEN", "before")
        # Set outside of ``values_of``, which would take it back.
        monkeypatch.setenv("MY_TOKEN", "hf_mine")
        part_command("part", lambda values: None, EngineConfig).main(
            [argument], standalone_mode=False
        )
        assert os.environ["HF_TOKEN"] == token


def test_an_invalid_token(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for config, words in (
        (HubConfig(hf_token=""), "--hf-token is empty"),
        (HubConfig(hf_token="a", hf_token_path="b"), "both give the token"),
        (HubConfig(hf_token_path=str(tmp_path / "none")), "none: No such file or directory"),
        (HubConfig(hf_token_path=str(tmp_path / "empty")), "empty is empty"),
    ):
        with pytest.raises(UsageError, match=words):
            config.token()


def test_llama_cpps_names_are_translated() -> None:
    options = {"--model", "--weight-file", "--hf-token"}
    line = ["-hfr", "a/b", "-hff", "c.gguf", "-hft", "t"]
    own = ["--model", "a/b", "--weight-file", "c.gguf", "--hf-token", "t"]
    assert translate(line, options) == own
