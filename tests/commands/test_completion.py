"""Completion by bash, zsh and fish; a shell that is not installed is skipped."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from select import select

import pytest
from click.testing import CliRunner

from tandem.__main__ import cli
from tandem.commands.completion import COMPLETIONS, PROGRAM, VARIABLE

PATIENCE_SECONDS = 20.0
BASH = f"""
eval "$(tandem completion bash)"
COMP_WORDS=(tandem serve --dtype = b) COMP_CWORD=4
_{PROGRAM}_completion tandem
echo "${{COMPREPLY[@]}}"
"""
# Control-G prints the line, and clears it.
ZSH = """autoload -U compinit; compinit -u -D; eval "$(tandem completion zsh)"
show() { zle -I; print -r -- "<$BUFFER>"; BUFFER= }; zle -N show; bindkey '^G' show
print -r -- '<'ready'>'
"""
# Lines before and after completion.
LINES = [
    ("tandem rout", "router"),
    ("tandem serve --dtype=bf", "--dtype=bfloat16"),
    ("tandem serve --log-dir=sub", "--log-dir=subfolder/"),
    ("tandem --max-num-s", "--max-num-seqs"),
]


def script(shell: str) -> str:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="tandem")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_a_shell_gets_a_script(shell: str) -> None:
    text = script(shell)
    assert f"{VARIABLE}={shell}_complete" in text
    assert re.search(r"^ *(complete|compdef) .*\btandem\b", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "ro", ["router"]),
        ([], "--max-num-s", ["--max-num-seqs"]),
        (["nodes"], "dr", ["drain"]),
        (["serve", "builtin"], "--max-num-s", ["--max-num-seqs"]),
        (["serve", "--isq", "--no-such"], "--max-num-s", ["--max-num-seqs"]),
        (["--m", "builtin"], "--max-num-s", ["--max-num-seqs"]),
        (["serve", "--dtype"], "b", ["bfloat16"]),
        (["serve", "--log-dir"], "lo", ["file lo"]),
        (["serve"], "mod", ["file mod"]),
    ],
)
def test_the_shell_completes(words: list[str], incomplete: str, expected: list[str]) -> None:
    completer = COMPLETIONS["bash"](cli, {}, PROGRAM, VARIABLE)
    items = completer.get_completions(words, incomplete)
    assert [i.value if i.type == "plain" else f"{i.type} {i.value}" for i in items] == expected


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell with ``tandem``, in a home without settings."""
    program = tmp_path / "bin" / "tandem"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tandem "$@"\n')
    program.chmod(0o755)
    (tmp_path / "subfolder").mkdir()
    path = f"{program.parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "COLUMNS": "200"}


def program(shell: str) -> str:
    return shutil.which(shell) or pytest.skip(f"{shell} is not installed")


def test_bash_completes(tmp_path: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        [program("bash"), "--norc", "-c", BASH],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (result.stdout, result.stderr) == ("bfloat16\n", "")


def test_fish_completes(tmp_path: Path, environment: dict[str, str]) -> None:
    script = "; ".join(f"complete --do-complete '{line}'" for line, _ in LINES)
    result = subprocess.run(
        [program("fish"), "--no-config", "-c", f"tandem completion fish | source; {script}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    items = [line.partition("\t") for line in result.stdout.splitlines()]
    assert [value for value, _, _ in items] == [value for _, value in LINES], result.stderr
    assert items[0][2] == "Start a router: HTTP in, tokens out."


class Terminal:
    """An interactive shell."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._end, end = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(end)

    def type(self, text: str, until: str) -> None:
        """Returns when ``until`` is on the screen."""
        os.write(self._end, text.encode())
        items, deadline = "", time.monotonic() + PATIENCE_SECONDS
        while until not in items:
            ready, _, _ = select([self._end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, items
            items += os.read(self._end, 4096).decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        os.close(self._end)


def test_zsh_completes(tmp_path: Path, environment: dict[str, str]) -> None:
    shell = Terminal([program("zsh"), "-f", "-i"], tmp_path, environment)
    try:
        shell.type(ZSH, until="<ready>")
        for line, value in LINES:
            # What zsh writes on the screen is mixed with the cursor's moves.
            shell.type(f"{line}\t\x07", until=f"{value}")
    finally:
        shell.close()
