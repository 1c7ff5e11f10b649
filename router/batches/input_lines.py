"""The lines of an input file: split from its pieces, and checked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...shared.errors import RequestError
from ..http.json_body import parse_json
from ..requests.body_errors import JSON_NAMES
from .file_store import FileStore, StoredFile
from .rows import BatchRequest

# OpenAI's limits.
MAX_REQUESTS = 50_000
MAX_CUSTOM_ID = 512
# Errors of one file to report.
MAX_ERRORS = 100
MAX_BLANK_BYTES = 1 << 20
# Lines to check and to store at once.
LINES_AT_ONCE = 500


async def lines_of(
    files: FileStore, file: StoredFile, max_bytes: int
) -> AsyncIterator[list[tuple[int, bytes]]]:
    """Yield groups of lines that are not blank, with their numbers. A line longer than
    ``max_bytes`` is cut off one byte after, so that it is reported as too long."""
    rest, number, position = bytearray(), 0, 0
    while (chunk := await files.read(file, position)) is not None:
        data, position = chunk
        # In a thread, because a piece may have a million lines.
        lines, number = await asyncio.to_thread(_split, rest, data, number, max_bytes)
        for start in range(0, len(lines), LINES_AT_ONCE):
            yield lines[start : start + LINES_AT_ONCE]
    if not _is_blank(rest):
        yield [(number + 1, bytes(rest))]


def _split(
    rest: bytearray, data: bytes, number: int, max_bytes: int
) -> tuple[list[tuple[int, bytes]], int]:
    """The complete lines after line ``number`` that are not blank, and the number of the last line.
    ``rest`` is the beginning of the first one; it is replaced by the beginning of the next line."""
    *lines, tail = data.split(b"\n")
    if lines:
        rest += lines[0][: max_bytes + 1 - len(rest)]
        lines[0] = bytes(rest)
        rest.clear()
    rest += tail[: max_bytes + 1 - len(rest)]
    numbered = [(number + i, line) for i, line in enumerate(lines, 1) if not _is_blank(line)]
    return numbered, number + len(lines)


def _is_blank(line: bytes | bytearray) -> bool:
    """True for white space up to a length that is checked quickly."""
    return not line or (len(line) <= MAX_BLANK_BYTES and line.isspace())


@dataclass(slots=True)
class LineChecker:
    """Checks the lines of one batch. ``model`` is the model of the first request."""

    endpoint: str
    max_bytes: int  # of a line
    total: int = 0
    model: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    _custom_ids: set[bytes] = field(default_factory=set)  # digests

    @property
    def full(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or self.total > MAX_REQUESTS

    async def check(self, lines: list[tuple[int, bytes]]) -> list[BatchRequest]:
        """The requests of the next lines that are valid; the others are added to ``errors``."""
        return await asyncio.to_thread(lambda: list(self._check(lines)))

    def finish(self) -> None:
        """Check the number of requests."""
        if self.total > MAX_REQUESTS:
            message = f"The file has more than {MAX_REQUESTS} requests, which is the limit."
            self.errors = [_error("too_many_tasks", message)]
        elif not self.total:
            self.errors.append(_error("empty_file", "The input file has no request."))

    def _check(self, lines: list[tuple[int, bytes]]) -> Iterator[BatchRequest]:
        for number, line in lines:
            self.total += 1
            if self.full:
                return
            problem, custom_id = self._problem(line)
            if problem is None:
                yield BatchRequest(number, custom_id, line)
            else:
                self.errors.append({**problem, "line": number})

    def _problem(self, line: bytes) -> tuple[dict[str, Any] | None, str]:
        """The error of a line, if it has one, and its ``custom_id``."""
        if len(line) > self.max_bytes:
            message = f"This line is over the limit of {self.max_bytes} bytes."
            return _error("line_too_long", message), ""
        try:
            value = parse_json(line)
        except RequestError as error:
            message = f"This line is not parseable as valid JSON: {error}"
            return _error("invalid_json_line", message), ""
        if not isinstance(value, dict):
            return _error("invalid_json_line", "This line is not a JSON object."), ""
        return self._problem_of(value), str(value.get("custom_id"))

    def _problem_of(self, value: dict[str, Any]) -> dict[str, Any] | None:
        for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
            if value.get(name) is None:
                message = f"Missing required parameter: '{name}'."
                return _error("missing_required_parameter", message, name)
            if not isinstance(value[name], kind):
                message = f"Invalid type for '{name}': expected {JSON_NAMES[kind]}."
                return _error("invalid_type", message, name)
        if not 0 < len(value["custom_id"]) <= MAX_CUSTOM_ID:
            message = f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters."
            return _error("invalid_custom_id", message, "custom_id")
        if value["method"] != "POST":
            return _error("invalid_method", "'method' must be 'POST'.", "method")
        if value["url"] != self.endpoint:
            message = f"'url' must be the batch's endpoint, '{self.endpoint}'."
            return _error("mismatched_endpoint", message, "url")
        return self._duplicate(value)

    def _duplicate(self, value: dict[str, Any]) -> dict[str, Any] | None:
        digest = hashlib.blake2b(value["custom_id"].encode(), digest_size=16).digest()
        if digest in self._custom_ids:
            short = value["custom_id"][:64]
            message = f"The custom_id '{short}' is used for another request of this file."
            return _error("duplicate_custom_id", message, "custom_id")
        self._custom_ids.add(digest)
        if not self.model and isinstance(value["body"].get("model"), str):
            self.model = value["body"]["model"][:256]
        return None


def _error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": None}
