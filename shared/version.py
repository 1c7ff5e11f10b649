"""The installed package: its version, and how to install its optional parts."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """``unknown`` when it runs from a folder that was never installed."""
    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """The command that installs an optional part. No package index has Tandem."""
    return f"pip install '.[{extra}]' in Tandem's checkout"
