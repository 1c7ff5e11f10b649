"""The documents, their blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "deploy").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command, and the parts of its output that comments below it show."""

    document: str
    line: str
    shown: list[str] = field(default_factory=list)


def blocks(language: str) -> list[tuple[str, str]]:
    """The document and the text of each block of a language."""
    return [
        (document.name, body)
        for document in DOCUMENTS
        for kind, body in BLOCK.findall(document.read_text())
        if kind == language
    ]


def shown_commands() -> list[ShownCommand]:
    """The commands of all blocks of shell."""
    return [command for document, body in blocks("sh") for command in _commands(document, body)]


def _commands(document: str, body: str) -> list[ShownCommand]:
    commands: list[ShownCommand] = []
    command = ""
    for line in body.replace("\\\n", " ").splitlines():
        if not command and line.startswith("# "):
            commands[-1].shown.append(
                line.removeprefix("# ").removeprefix("...").removesuffix("...")
            )
            continue
        command += line
        try:
            shlex.split(command)
        except ValueError:  # a quotation goes on
            command += "\n"
            continue
        if command.strip():
            commands.append(ShownCommand(document, command))
        command = ""
    assert not command, f"{document}: a quotation without an end"
    return commands
