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
    return [made for document, body in blocks("sh") for made in _commands(document, body)]


def _commands(document: str, body: str) -> list[ShownCommand]:
    made: list[ShownCommand] = []
    begun = ""
    for line in body.replace("\\\n", " ").splitlines():
        if not begun and line.startswith("# "):
            made[-1].shown.append(line.removeprefix("# ").removeprefix("...").removesuffix("..."))
            continue
        begun += line
        try:
            shlex.split(begun)
        except ValueError:  # a quotation goes on
            begun += "\n"
            continue
        if begun.strip():
            made.append(ShownCommand(document, begun))
        begun = ""
    assert not begun, f"{document}: a quotation without an end"
    return made
