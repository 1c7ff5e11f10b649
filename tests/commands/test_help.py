"""Help that fits on a terminal, errors of one line, and completion."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tandem.__main__ import cli, main
from tandem.commands import failures
from tandem.commands.failures import debugging
from tandem.commands.help_page import option_groups
from tandem.shared.security.local_token import token_file


def help_text(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, prog_name="tandem", terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_fits_in_80_columns_and_shows_every_option(name: str) -> None:
    short = help_text(name, "--help")
    every = short if isinstance(cli.commands[name], click.Group) else help_text(name, "--help=all")
    for text in (short, every):
        assert [line for line in text.splitlines() if len(line) > 80] == []
    flags = [option.opts[0] for option in cli.commands[name].params if option.opts[0][0] == "-"]
    assert [flag for flag in flags if flag not in every] == []


def test_the_first_page_shows_how_to_begin_and_every_command() -> None:
    text = help_text("--help")
    assert "tandem serve builtin" in text and "-h, --help" in text
    first = {line.split()[0] for line in text.splitlines() if re.match("  [a-z]", line)}
    assert cli.commands.keys() <= first


@pytest.mark.parametrize("name", ["chat", "complete", "run-batch"])
def test_options_of_the_engine_are_left_to_those_who_ask(name: str) -> None:
    assert "--max-num-seqs" not in help_text(name, "--help") and "engine" in help_text(
        name, "--help"
    )


def test_a_long_help_begins_with_what_most_need() -> None:
    short = help_text("serve", "--help")
    assert len(short.splitlines()) < 110
    assert "Common options:" in short and "--window-bytes" not in short
    groups = {group.name for group in option_groups(cli.commands["serve"].params)}
    assert {"engine", "http", "sampling"} <= groups and "options" not in groups
    assert re.search(r"^  engine +\d+: ", short, re.MULTILINE)


@pytest.mark.parametrize(
    ("topic", "has", "lacks"),
    [
        ("sampling", "--top-k", "--port"),
        ("Sampling", "--top-k", "--port"),
        ("port", "HTTP port", "--kv-port"),
        ("max_model_len", "--max-model-len", "--max-num-seqs"),
        ("tls", "--tls-cert", "--window-bytes"),
    ],
)
def test_help_about_a_group_or_an_option(topic: str, has: str, lacks: str) -> None:
    text = help_text("serve", f"--help={topic}")
    assert has in text and lacks not in text


def test_help_is_a_command_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "help", "chat"])
    main()
    assert capsys.readouterr().out.startswith("Usage: tandem chat [OPTIONS] [MODEL]")


def test_version_is_a_command_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "version"])
    main()
    assert capsys.readouterr().out.startswith("tandem, version ")


def test_bench_alone_shows_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Usage: tandem bench [OPTIONS] COMMAND [ARGS]..."
    assert any(line.startswith("  interference ") for line in lines)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-modle-len", "1"], "Did you mean --max-model-len?"),
        (
            ["router", "--max-model-len", "1"],
            "It is an option of tandem prefill-node, decode-node,",
        ),
        (
            ["serve", "--prefill", "1"],
            "tandem serve --help=prefill shows the options that contain",
        ),
        (["serve", "--zzz", "1"], "No such option '--zzz'. tandem serve --help=all lists all."),
        (["serve", "-z", "1"], "No such option '-z'. tandem serve --help=all lists all."),
        (["serve", "-ngl", "99"], "-ngl is not supported: all layers are on the GPUs"),
        (["serve", "--ctx-size", "9"], "use --max-model-len, the context of one sequence"),
        (["chat", "--model-url", "a/b"], "give the repository as MODEL"),
        (["serv"], "Did you mean 'serve'?"),
        (["pull"], "pull needs the MODEL to download"),
        (["show", "a/b"], "tandem info MODEL describes a model"),
        (["a/b", "--port", "1"], "to serve a model: tandem serve a/b"),
        (["--m", "x", "--isq", "q9k"], "--isq"),
        (["router", "--temperature", "nan"], "'nan' is not a number"),
        (["run-batch", "-i", "a", "-o", "a"], "-i and -o are the same file"),
        (["--max-model-len", "x"], "Invalid value for '--max-model-len': 'x' is not an integer"),
        (["--port", "99999"], "99999 is out of range: it must be from 0 to 65535"),
        (["nodes", "drain", "n", "--timeout", "-1"], "it must be at least 0"),
        (["--versoin"], "Did you mean --version?"),
        (["chat", "a", "b"], "extra argument (b). Usage: tandem chat [OPTIONS] [MODEL]"),
        (["doctor"], "Missing argument 'URL'. Usage: tandem doctor [OPTIONS] URL"),
        (["run-batch"], "run-batch needs -i REQUESTS.jsonl and -o RESULTS.jsonl"),
        (["serve", "--help=nothing"], "the groups are processes, engine, hosts, hub, "),
    ],
)
def test_wrong_usage_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: ") and words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nodes", "drain", "n", "--timeout", "-1"], "it must be at least 0"),
        (["nodes", "role", "n", "encode"], "'encode' is not one of 'prefill', 'decode'"),
        (["nodes", "drain"], "Missing argument 'NODE'"),
        (["nodes", "drian", "n"], "No such command 'drian'"),
        (["nodes", "drain", "n"], "several routers run here; choose one with --router"),
        (["nodes"], "several routers run here; choose one with --router"),
    ],
)
def test_who_runs_two_routers_hears_of_a_wrong_option_before_choosing_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    with token_file("127.0.0.1:1", "one", ""), token_file("127.0.0.1:2", "two", ""):
        assert run(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("level", "lines"), [([], 1), (["--log-level", "debug"], 9)])
def test_a_bug_is_one_line_unless_debugged(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: list[str],
    lines: int,
) -> None:
    def fail(**values: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(cli.commands["router"], "callback", fail)
    assert run(monkeypatch, "router", *level) == 1
    lines_printed = capsys.readouterr().err.splitlines()
    assert re.match(
        r"tandem: unexpected ZeroDivisionError at .*\.py:\d+: by nothing", lines_printed[-1]
    )
    assert (len(lines_printed) > 5) == (lines > 5)


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (click.Abort(), 130), (BrokenPipeError(), 1)]
)
def test_an_interrupt_and_a_closed_pipe_are_quiet(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
) -> None:
    def fail(**values: object) -> None:
        raise error

    monkeypatch.setattr(failures, "silence_output", lambda: None)
    monkeypatch.setattr(cli.commands["router"], "callback", fail)
    assert run(monkeypatch, "router") == status
    assert capsys.readouterr().err.strip() == ("" if status == 1 else "tandem: interrupted")


def test_an_error_of_the_system_names_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.commands["router"], "callback", lambda **_: Path("/none/x").read_text())
    assert run(monkeypatch, "router") == 1
    assert capsys.readouterr().err == "tandem: /none/x: No such file or directory\n"


def test_debugging_is_the_last_level_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not debugging(["router"])
    assert debugging(["router", "--log-level=debug"])
    assert not debugging(["--log-level", "debug", "--log-level=info"])
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    assert debugging(["router"])
