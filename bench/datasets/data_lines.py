"""Files of requests, and checks of their values with the place in error messages."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from ...shared.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, or an item of its list."""

    path: Path
    line: int
    unit: str = "line"

    def error(self, field: str, problem: str) -> UsageError:
        """The error of a field, or of the whole line."""
        details = f"{field} {problem}" if field else problem
        return UsageError(f"{self.path}, {self.unit} {self.line}: {details}")

    def whole_number(self, record: Mapping[str, Any], field: str, low: int, high: int) -> int:
        """A field that must be an integer within bounds."""
        value = _number(self._value(record, field))
        if value is None or int(value) != value or not low <= value <= high:
            raise self.error(
                field, f"is {record[field]!r}; a whole number from {low} to {high:,} is expected"
            )
        return int(value)

    def number(self, record: Mapping[str, Any], field: str) -> float:
        """A field that must be a number."""
        value = _number(self._value(record, field))
        if value is None:
            raise self.error(field, f"is {record[field]!r}; a number is expected")
        return value

    def text(self, record: Mapping[str, Any], field: str) -> str:
        """A field that must be a non-empty string."""
        value = self._value(record, field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"is {str(value)[:80]!r}; a text is expected")
        return value

    def _value(self, record: Mapping[str, Any], field: str) -> Any:
        if field not in record:
            raise self.error(
                field, f"is missing; there are {', '.join(map(str, record)) or 'none'}"
            )
        return record[field]


def _number(value: Any) -> float | None:
    """A finite number, or a string with one, as in CSV files."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def json_lines(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The objects of a JSONL file; empty lines are skipped. Raises ``UsageError``."""
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            place = Place(path, number)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise place.error("", f"not JSON: {error}") from None
            if not isinstance(record, dict):
                raise place.error("", "a JSON object is expected")
            yield place, record


def csv_lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The rows of a CSV file whose first line names the columns. Raises ``UsageError``."""
    with _open(path) as file:
        reader = csv.DictReader(_lines(file, path))
        names = [name.strip() for name in reader.fieldnames or ()]
        missing = [name for name in columns if name not in names]
        if missing:
            raise Place(path, 1).error(
                missing[0], f"is not a column; the first line must name {','.join(columns)}"
            )
        reader.fieldnames = names
        try:
            for row in reader:
                yield Place(path, reader.line_num), {k: v for k, v in row.items() if v is not None}
        except csv.Error as error:
            raise Place(path, reader.line_num).error("", f"not CSV: {error}") from None


def json_list(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The objects of a file with one JSON list. Raises ``UsageError``."""
    with _open(path) as file:
        try:
            items = json.load(file)
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not text in UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(items, list):
        raise UsageError(f"{path} must have a JSON list")
    for number, item in enumerate(items, 1):
        place = Place(path, number, "item")
        if not isinstance(item, dict):
            raise place.error("", "a JSON object is expected")
        yield place, item


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"--dataset-path {path}: {error.strerror}") from None


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not a file") from None
