"""Files that are written atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..shared.errors import UsageError


def check_target(flag: str, name: str) -> None:
    """Raise ``UsageError`` if a file of this name cannot be written, before the work is done."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{flag} {name} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {name}: the folder does not exist")


@contextlib.contextmanager
def whole_file(flag: str, name: str) -> Iterator[TextIO]:
    """A text file that replaces ``name`` once the block ends without an error. Raises
    ``UsageError`` if it cannot be written."""
    check_target(flag, name)
    path = Path(name)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = partial.open("x", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {name}: {error.strerror}") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
