"""The requests of a batch: a JSONL file, which is checked before the first request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shared.errors import UsageError

MAX_LINE = 32 << 20
PREFIX = "/v1/"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request; ``path`` is relative to the API's URL."""

    number: int
    custom_id: str
    path: str
    body: bytes


class BatchFile:
    """A file of requests."""

    def __init__(self, path: Path, name: str) -> None:
        """``name`` is the file's name in errors."""
        self._path = path
        self._name = name
        self.count = 0
        self.digest = ""

    def check(self) -> None:
        """Read all of it. Raises ``UsageError`` with the first line that is not a request."""
        digest = hashlib.sha256()
        for number, line in self._lines():
            digest.update(line)
            self._parse(number, line)
            self.count += 1
        if not self.count:
            raise UsageError(f"{self._name} has no request")
        self.digest = digest.hexdigest()

    def lines(self) -> Iterator[BatchLine]:
        """The requests in their order, after ``check``."""
        for number, line in self._lines():
            yield self._parse(number, line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE + 1):
                    number += 1
                    if len(line) > MAX_LINE:
                        raise UsageError(f"{self._name}:{number} has more than {MAX_LINE} bytes")
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise UsageError(f"--input-file {self._name}: {error.strerror}") from None

    def _parse(self, number: int, line: bytes) -> BatchLine:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UsageError(f"{self._name}:{number} is not a JSON object")
        problem = _problem(value)
        if problem:
            raise UsageError(f"{self._name}:{number}: {problem}")
        body = json.dumps(value["body"]).encode()
        return BatchLine(number, value["custom_id"], value["url"].removeprefix(PREFIX), body)


def _problem(value: dict[str, Any]) -> str:
    """The problem of a line; empty if it is valid."""
    for name, kind, expected in (
        ("custom_id", str, "a string"),
        ("method", str, "'POST'"),
        ("url", str, "a path"),
        ("body", dict, "an object"),
    ):
        if not isinstance(value.get(name), kind):
            return f"'{name}' must be {expected}"
    if value["method"] != "POST":
        return f"'method' must be 'POST', not {value['method'][:20]!r}"
    if not value["url"].startswith(PREFIX) or ".." in value["url"]:
        return f"'url' must be a path such as /v1/chat/completions, not {value['url'][:80]!r}"
    if value["body"].get("stream"):
        return "'stream' is not available in a batch"
    return ""
