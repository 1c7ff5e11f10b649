"""Every command and snippet in the documents is real."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from tandem.__main__ import cli
from tandem.tests import generated_docs

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*.md"), *(ROOT / "docs").glob("*.md")]
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (document.name, body)
        for document in DOCUMENTS
        for kind, body in BLOCK.findall(document.read_text())
        if kind == language
    ]


def shell_lines(program: str) -> list[str]:
    return [
        line
        for _, body in blocks("sh")
        for line in body.replace("\\\n", " ").splitlines()
        if line.startswith(program + " ")
    ]


@pytest.mark.parametrize("line", shell_lines("tandem"))
def test_documented_commands_parse(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command: click.Command = cli.commands[name]
    if isinstance(command, click.Group) and arguments[:1] and arguments[0] in command.commands:
        name, *arguments = arguments
        command = command.commands[name]
    with command.make_context(name, arguments) as context:
        assert isinstance(context, click.Context)


def test_documented_agents_are_told_what_the_contracts_tell_them() -> None:
    suite = (ROOT / "tests/contracts/own-venv/contract_agents.py").read_text()
    page = (ROOT / "docs/clients.md").read_text()
    wanted = re.search(r'CODEX = f"""(.*?)"""', suite, re.DOTALL)
    assert wanted is not None
    [codex] = [tomllib.loads(body) for kind, body in BLOCK.findall(page) if kind == "toml"]
    used = tomllib.loads(wanted[1])
    assert codex.keys() == used.keys() - {"sandbox_mode"}
    assert codex["model_providers"]["tandem"].keys() == used["model_providers"]["tandem"].keys()
    names = set(re.findall(r"\b(?:ANTHROPIC|CLAUDE_CODE)_[A-Z_]+(?==)", page))
    assert names == set(re.findall(r'"((?:ANTHROPIC|CLAUDE_CODE)_[A-Z_]+)"', suite))
    [opencode] = [json.loads(body) for kind, body in BLOCK.findall(page) if kind == "json"]
    tandem = opencode["provider"]["tandem"]
    assert tandem["npm"] == "@ai-sdk/openai-compatible" and '"baseURL"' in suite
    assert all(f'"{name}"' in suite for name in (*tandem, *tandem["options"]))


@pytest.mark.parametrize("line", shell_lines("make"))
def test_documented_targets_exist(line: str) -> None:
    target = line.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("body", [body for _, body in blocks("python")])
def test_documented_python_runs(body: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_documents_link_to_files_that_exist() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_generated_parts_are_up_to_date() -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, text in generated_docs.documents().items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run make docs"
