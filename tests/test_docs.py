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
from tandem.tests.support.documents import BLOCK, DOCUMENTS, ROOT, blocks, shown_commands
from tandem.tests.test_imports import FOLDERS


def shell_lines(program: str) -> list[str]:
    """The commands of a program, also those that read another one's output."""
    lines = [command.line for command in shown_commands()]
    piped = [line.rpartition(f"| {program} ")[2] for line in lines if f"| {program} " in line]
    return [
        *(line for line in lines if line.startswith(f"{program} ")),
        *(f"{program} {arguments}" for arguments in piped),
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


def test_documented_agent_settings_equal_those_of_the_contracts() -> None:
    suite = (ROOT / "contracts/own-venv/contract_agents.py").read_text()
    page = (ROOT / "docs/guides/agents.md").read_text()
    match = re.search(r'CODEX = f"""(.*?)"""', suite, re.DOTALL)
    assert match is not None
    [codex] = [tomllib.loads(body) for kind, body in BLOCK.findall(page) if kind == "toml"]
    suite_config = tomllib.loads(match[1])
    assert codex.keys() == suite_config.keys() - {"sandbox_mode"}
    assert (
        codex["model_providers"]["tandem"].keys()
        == suite_config["model_providers"]["tandem"].keys()
    )
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
    for output in re.findall(r"print\(.*  # (.+)", body):
        assert output in done.stdout


def test_what_is_installed_is_in_this_checkout() -> None:
    """No package index has Tandem, and anybody could take its name there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [path for path in ROOT.rglob("*.py") if not path.is_relative_to(ROOT / ".venv")]
    for path in (*DOCUMENTS, *sources, ROOT / "Makefile", ROOT / "deploy" / "Dockerfile"):
        text = path.read_text()
        assert f"{project['name']}[" not in text and f"install {project['name']}" not in text, path
        for extras in re.findall(r"pip install '?\.\[([a-z,]+)\]", text):
            assert {*extras.split(",")} <= {*project["optional-dependencies"]}, path


def added_in(example: str) -> list[tuple[str, str]]:
    """The files of a diff in CONTRIBUTING.md, and what it adds to each."""
    parts = re.findall(r"^\+\+\+ (\S+)\n((?:\+.*\n)+?)(?=\+\+\+ |\Z)", example, re.MULTILINE)
    return [(name, re.sub(r"^\+", "", lines, flags=re.MULTILINE)) for name, lines in parts]


def examples() -> list[str]:
    return [body for document, body in blocks("diff") if document == "CONTRIBUTING.md"]


def test_the_worked_examples_are_what_stands_in_the_files() -> None:
    family, parameter = map(added_in, examples())
    assert (len(family), len(parameter)) == (3, 7)
    for name, added in (*family, *parameter):
        assert added in (ROOT / name).read_text(), name


# Where the name is that of a message's field, or of what other programs write.
NAMED_BESIDES = {
    "proto/tandem_pb2.py",
    "proto/tandem_pb2.pyi",
    "shared/models/no_effect.py",
    "shared/weights/gguf/generation_config.py",
}


def test_the_worked_example_of_a_parameter_is_all_of_it() -> None:
    """No other source names it: everything else is made from the table."""
    mentioned = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".js", ".proto")
        and re.search(r"\bmin_p\b", path.read_text())
    }
    files = {name for name, _ in added_in(examples()[1]) if not name.startswith("tests/")}
    assert mentioned - NAMED_BESIDES == files


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_link_to_files_and_headings_that_exist() -> None:
    for document in DOCUMENTS:
        text = BLOCK.sub("", document.read_text())
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):]*)\)", text):
            file = document.parent / target if target else document
            assert file.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{document.name}: {target}#{anchor}"


def test_generated_parts_are_up_to_date() -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, text in generated_docs.documents().items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run make docs"
