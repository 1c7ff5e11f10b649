"""The lines of an input file: cut from its pieces, and checked."""

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
from .stored import BatchRequest

# As in OpenAI's API.
MAX_REQUESTS = 50_000
MAX_CUSTOM_ID = 512
# Errors of one file that are reported.
MAX_ERRORS = 100
LONGEST_BLANK = 1 << 20
# Lines that are checked and stored at once.
LINES_AT_ONCE = 500


async def lines_of(
    files: FileStore, file: StoredFile, longest: int
) -> AsyncIterator[list[tuple[int, bytes]]]:
    """The lines that are not blank, with their numbers, some at a time. The end of one longer than
    ``longest`` is cut off, which makes it invalid."""
    rest, number, position = bytearray(), 0, 0
    while (read := await files.read(file, position)) is not None:
        data, position = read
        # In a thread, as a piece may have a million lines.
        lines, number = await asyncio.to_thread(_cut, rest, data, number, longest)
        for start in range(0, len(lines), LINES_AT_ONCE):
            yield lines[start : start + LINES_AT_ONCE]
    if not _is_blank(rest):
        yield [(number + 1, bytes(rest))]


def _cut(
    rest: bytearray, data: bytes, number: int, longest: int
) -> tuple[list[tuple[int, bytes]], int]:
    """The lines after that of ``number`` that are not blank, and the number of the last one.
    ``rest`` is the beginning of the first of them, and then of the one that has not ended."""
    *lines, unended = data.split(b"\n")
    if lines:
        rest += lines[0][: longest + 1 - len(rest)]
        lines[0] = bytes(rest)
        rest.clear()
    rest += unended[: longest + 1 - len(rest)]
    found = [(number + i, line) for i, line in enumerate(lines, 1) if not _is_blank(line)]
    return found, number + len(lines)


def _is_blank(line: bytes | bytearray) -> bool:
    """True for white space, unless it is so much that it takes long to look at."""
    return not line or (len(line) <= LONGEST_BLANK and line.isspace())


@dataclass(slots=True)
class LineChecker:
    """Checks the lines of one batch. ``model`` is that of the first line."""

    endpoint: str
    longest: int
    total: int = 0
    model: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or self.total > MAX_REQUESTS

    async def check(self, lines: list[tuple[int, bytes]]) -> list[BatchRequest]:
        """The valid ones of the next lines; the others become ``errors``."""
        return await asyncio.to_thread(lambda: list(self._check(lines)))

    def finish(self) -> None:
        """Check the number of all lines."""
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
        """What is wrong with a line, if anything, and its ``custom_id``."""
        if len(line) > self.longest:
            message = f"This line is over the limit of {self.longest} bytes."
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
        if digest in self._seen:
            shown = value["custom_id"][:64]
            message = f"The custom_id '{shown}' is used for another request of this file."
            return _error("duplicate_custom_id", message, "custom_id")
        self._seen.add(digest)
        if not self.model and isinstance(value["body"].get("model"), str):
            self.model = value["body"]["model"][:256]
        return None


def _error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": None}
