"""Logging for every process: one line an event on stderr, named after the part that speaks."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def setup_logging(level: str = "info") -> None:
    """Call once, in a process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def logger(part: str) -> logging.Logger:
    """The logger of a part, for instance ``router`` or ``decode``."""
    return logging.getLogger(f"tandem.{part}")
