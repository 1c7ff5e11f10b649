"""Results of an incomplete batch, kept beside its output, so that another run can continue."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...shared.errors import UsageError
from ..text import json_text


class PartialResults:
    """A JSONL file whose first line identifies the input; the others are results by line number.

    A line that a crash has truncated is dropped.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._places: dict[int, tuple[int, int]] = {}
        self._file: BinaryIO | None = None

    @property
    def done(self) -> set[int]:
        """The numbers of the lines with a result."""
        return set(self._places)

    def open(self) -> None:
        """Read the file, or create it. Raises ``UsageError`` if it cannot be written, or belongs to
        another input."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # other users may write to the folder
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run writes {self._path}") from None
        except OSError as error:
            raise UsageError(f"--output-file: {self._path}: {error.strerror}") from None
        head = self._file.readline()
        if not head.endswith(b"\n"):
            self._restart()
        elif _parse(head) != {"input": self._digest}:
            raise UsageError(f"{self._path} has results of another input; remove or rename it")
        else:
            self._read()

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Append the result of a line."""
        assert self._file is not None
        data = json_text({"line": number, "result": result}).encode() + b"\n"
        self._places[number] = self._file.tell(), len(data)
        self._file.write(data)
        self._file.flush()

    def in_order(self) -> Iterator[str]:
        """The results as lines, in the order of their requests."""
        assert self._file is not None
        for _, (at, size) in sorted(self._places.items()):
            self._file.seek(at)
            result = json.loads(self._file.read(size))["result"]
            yield json_text(result) + "\n"

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and ``remove`` it once its results are elsewhere."""
        if self._file is not None:
            self._file.close()
        if remove:
            self._path.unlink(missing_ok=True)

    def _restart(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({"input": self._digest}).encode() + b"\n")
        self._file.flush()

    def _read(self) -> None:
        assert self._file is not None
        at = self._file.tell()
        for line in self._file:
            value = _parse(line) if line.endswith(b"\n") else None
            if not isinstance(value, dict) or not isinstance(value.get("line"), int):
                break
            self._places[value["line"]] = at, len(line)
            at += len(line)
        self._file.seek(at)
        self._file.truncate()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
