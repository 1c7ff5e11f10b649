"""The version of Tandem that this process runs."""

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
