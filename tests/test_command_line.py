"""The command line: its surface is frozen, and its precedence fixed.

``TANDEM_TEST_REFRESH=1 pytest tests/test_command_line.py`` writes the surface anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tandem.__main__ import cli
from tandem.commands.part_command import join_names
from tandem.shared.config import EngineConfig, NodeConfig
from tandem.shared.config.command_line import command_options, fill
from tandem.shared.errors import UsageError

SURFACE = Path(__file__).with_name("command_line.txt")


def surface() -> str:
    """One line a flag: its names, its default, and what else it takes."""
    lines = []
    for name, command in sorted(cli.commands.items()):
        below = sorted(command.commands.items()) if isinstance(command, click.Group) else []
        for title, one in [(name, command), *((f"{name} {n}", c) for n, c in below)]:
            lines.append(f"tandem {title}")
            lines += sorted(f"  {_line(parameter)}" for parameter in one.params)
    return "\n".join(lines) + "\n"


def _line(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return f"[{parameter.make_metavar(click.Context(cli)).strip('[]')}]"
    names = " ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{names} | {parameter.type!r} | default {_default(parameter)} | {parameter.envvar}"


def _default(parameter: click.Parameter) -> Any:
    default = parameter.to_info_dict()["default"]
    return default if isinstance(default, (bool, int, float, str)) else None


def test_the_surface_is_frozen() -> None:
    if os.environ.get("TANDEM_TEST_REFRESH"):
        SURFACE.write_text(surface())
    assert surface() == SURFACE.read_text(), "if meant: TANDEM_TEST_REFRESH=1, and a CHANGELOG line"


def parse(arguments: list[str]) -> dict[str, Any]:
    command = click.Command("test", params=list(command_options(NodeConfig, EngineConfig)))
    with command.make_context("test", arguments) as context:
        return context.params


@pytest.mark.parametrize(
    ("flag", "environment", "yaml", "expected"),
    [
        (True, True, True, 1001),
        (False, True, True, 1002),
        (False, False, True, 1003),
        (False, False, False, 0),
        (True, False, True, 1001),
    ],
)
def test_flag_wins_over_environment_over_yaml_over_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: bool,
    environment: bool,
    yaml: bool,
    expected: int,
) -> None:
    arguments = []
    if environment:
        monkeypatch.setenv("TANDEM_PORT", "1002")
    if yaml:
        (tmp_path / "c.yaml").write_text("port: 1003\n")
        arguments.append(f"--config={tmp_path / 'c.yaml'}")
    if flag:
        arguments.append("--port=1001")
    assert fill(NodeConfig, parse(arguments)).port == expected


def test_yaml_takes_every_name_of_an_option(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tp: 2\nmax_model_len: 99\nenable-prefix-caching: false\nm: x\n")
    config = fill(EngineConfig, parse([f"--config={file}"]))
    assert (config.tensor_parallel_size, config.max_model_len) == (2, 99)
    assert (config.enable_prefix_caching, config.model) == (False, "x")


@pytest.mark.parametrize("alias", ["--m", "--model", "--w"])
def test_aliases_of_the_model(alias: str) -> None:
    assert parse([f"{alias}=here"])["model"] == "here"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_model_length: 8", "did you mean max.model.len"),
        ("- port", "must map"),
        ("a: [", "not YAML"),
        ("port: [1]", "one value"),
        ("tp: 1\ntensor-parallel-size: 2", "twice"),
        ("swap_space: 4", "swap_space is not supported: nothing is offloaded"),
        ("speculative_depth: 3", "not an option of any command"),
        ("auth: {api_keys: [secret]}", "'auth' is a section.*api_key"),
        ("auth:\n  api_keys: []\n  rate_limit_overrides: {a: {}}", "overrides: not supported"),
        ("server: {host: 0.0.0.0, port: 1}", "'server' is a section.*host, port"),
        ("engine:\n  num_kv_blocks: 9\n", "num_gpu_blocks_override"),
        ("auth:", "auth is not an option"),
        ("api_keys: a", "not an option of any command"),
        ("port: 1\nport: 2", "'port' is given twice"),
        ("port:", "'port' has no value"),
        ("port: ~", "'port' has no value"),
        ("[1]: 2", "not YAML"),
    ],
)
def test_a_wrong_yaml_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=word):
        parse([f"--config={tmp_path / 'c.yaml'}"])


def test_options_of_other_commands_and_variables_of_other_programs_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file serves a router and its nodes; Kubernetes makes variables of its own."""
    monkeypatch.setenv("TANDEM_SPECULATIVE_DEPTH", "3")
    file = tmp_path / "tandem.yaml"
    file.write_text("prefill-threshold: 7\nport: 8123\n")
    context = cli.make_context("tandem", ["router"])
    with pytest.raises(click.UsageError), context:
        cli.invoke(cli.make_context("tandem", ["router", "--config", str(file), "--port=x"]))
    stderr = capsys.readouterr().err
    assert (
        "environment: TANDEM_SPECULATIVE_DEPTH is not an option of any command and is ignored"
        in stderr
    )
    assert "prefill-threshold" not in stderr


def test_without_a_command_the_help_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem"], capture_output=True, text=True, timeout=45
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nServe a model:\n" in done.stdout


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ("M --served-model-name A B --port 1", "M --served-model-name A,B --port 1"),
        ("M --served-model-name A", "M --served-model-name A"),
        ("M --served-model-name --port 1", "M --served-model-name --port 1"),
        ("--served-model-name A M", "--served-model-name A M"),
    ],
)
def test_words_after_a_served_name_are_aliases_once_the_model_is_known(
    names: str, joined: str
) -> None:
    assert join_names(names.split()) == joined.split()
