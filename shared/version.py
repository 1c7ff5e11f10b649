"""The installed package: its version, and the command that installs optional parts."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed version; ``unknown`` if Tandem runs from a folder without installation."""
    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """The command that installs an optional part; Tandem is on no package index."""
    return f"pip install '.[{extra}]' in Tandem's checkout"


@cache
def versions() -> str:
    """The versions in which all hosts of a node must agree: torch's comes with NCCL's. Without
    loading torch."""
    return f"Tandem {version()} with torch {metadata.version('torch')}"
