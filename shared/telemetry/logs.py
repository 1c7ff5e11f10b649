"""Logging of every process: one line per event on stderr, with its context.

The context of a task (its request, its attempt at a transfer) is set once, by ``add_log_context``
or ``log_context``, and appears in every line that the task and its child tasks log."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from math import inf
from typing import Any, TextIO

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
TEXT, JSON = "text", "json"
# ``RateLimitedFilter`` passes one line per code location in this time.
QUIET_SECONDS = 10.0

# The key in HTTP headers and gRPC metadata.
REQUEST_ID_HEADER = "x-request-id"
# Request ids appear in logs and in headers of other programs: no quotes, spaces or line ends.
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@=+-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """The context of a log line; unknown fields are empty."""

    request_id: str = ""
    transfer_id: str = ""
    attempt: str = ""  # from 1
    trace_id: str = ""

    def as_dict(self) -> dict[str, str]:
        """The known fields."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if value}


_EMPTY = LogContext()
_context: ContextVar[LogContext] = ContextVar("log_context", default=_EMPTY)


def current_log_context() -> LogContext:
    """The context of the running task."""
    return _context.get()


def add_log_context(**values: str) -> None:
    """Extend the context until the task ends; for tasks that serve one request."""
    _context.set(replace(_context.get(), **values))


@contextmanager
def log_context(**values: str) -> Iterator[None]:
    """Extend the context for a part of a task. Not for use around the ``yield`` of an async
    generator, which another task may close."""
    token = _context.set(replace(_context.get(), **values))
    try:
        yield
    finally:
        _context.reset(token)


def checked_request_id(text: str) -> str:
    """``text``, which comes from a client, if it is a valid request id, else empty."""
    return text if _REQUEST_ID.fullmatch(text) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Format and level of a process's log, and the process's name in every line. ``rank`` is empty
    except in rank processes."""

    form: str = TEXT
    level: str = "info"
    role: str = ""
    node_id: str = ""
    rank: str = ""


class _Handler(logging.StreamHandler[TextIO]):
    """The only handler of a process; keeps its settings for child processes."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.stderr)
        self.settings = settings
        self.setFormatter(_JsonLines(settings) if settings.form == JSON else _TextLines(settings))


def setup_logging(settings: LogSettings) -> None:
    """Configure the root logger. Called once, in a process's main."""
    root = logging.getLogger()
    root.handlers[:] = [_Handler(settings)]
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.getLogger("tandem").setLevel(level)
    root.setLevel(max(level, logging.INFO))  # no debug lines of libraries


def log_settings() -> LogSettings:
    """This process's settings; defaults if a program that embeds Tandem configures logging."""
    settings = (h.settings for h in logging.getLogger().handlers if isinstance(h, _Handler))
    return next(settings, LogSettings())


def logger(part: str) -> logging.Logger:
    """The logger of a part, for instance ``router`` or ``decode``."""
    return logging.getLogger(f"tandem.{part}")


class RateLimitedFilter(logging.Filter):
    """Passes one warning per code location in ``QUIET_SECONDS``, and adds the number of suppressed
    ones to the next: strangers must not be able to fill a log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[tuple[str, int], float] = {}
        self._suppressed: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        kind, now = (record.pathname, record.lineno), self._clock()
        if now - self._logged_at.get(kind, -inf) < QUIET_SECONDS:
            self._suppressed[kind] += 1
            return False
        self._logged_at[kind] = now
        if suppressed := self._suppressed.pop(kind, 0):
            record.msg = f"{record.getMessage()} ({suppressed} more suppressed)"
            record.args = None
        return True


class _TextLines(logging.Formatter):
    """Text for people: message, the record's ``words``, and the context in brackets.

    Messages contain names and reasons from other processes, so line ends and control characters are
    escaped. Traceback lines are indented: a record ends where the next line begins with a date.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        self._process = f"{settings.node_id} rank {settings.rank}" if settings.rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _printable(super().formatMessage(record))
        context = current_log_context()
        parts = [
            self._process,
            f"request {context.request_id}" if context.request_id else "",
            f"transfer {context.transfer_id}/{context.attempt}" if context.transfer_id else "",
        ]
        brackets = ", ".join(filter(None, parts))
        details = _printable(getattr(record, "words", ""))
        return " ".join(filter(None, (line, details, f"[{brackets}]" if brackets else "")))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + _printable(line) for line in lines)


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class _JsonLines(logging.Formatter):
    """JSON for programs: one object per line, with the record's ``fields``."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._always = {"role": settings.role, "node_id": settings.node_id}
        if settings.rank:
            self._always["rank"] = settings.rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **current_log_context().as_dict(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
