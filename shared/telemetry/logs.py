"""Logging for every process: one line an event on stderr, with what it is about.

What a task works on (a request, an attempt at a transfer) is noted once, by ``add_log_context`` or
``log_context``, and stands in every line that the task and the tasks that it starts log.
"""

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
LEVELS = ("debug", "info", "warning", "error")
# How long after a line of ``RateLimitedFilter`` there is no other one like it.
QUIET_SECONDS = 10.0

# In HTTP headers, and in the metadata of calls between the parts.
REQUEST_ID_HEADER = "x-request-id"
# It stands in logs and in other programs' headers, so it has no quotes, spaces or line ends.
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@=+-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """What is being worked on; empty fields are not known here."""

    request_id: str = ""
    transfer_id: str = ""
    attempt: str = ""  # from 1
    trace_id: str = ""

    def known(self) -> dict[str, str]:
        named = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in named if value}


_NOTHING = LogContext()
_subject: ContextVar[LogContext] = ContextVar("subject", default=_NOTHING)


def current_log_context() -> LogContext:
    """What the running task works on."""
    return _subject.get()


def add_log_context(**known: str) -> None:
    """From here to the end of a task that belongs to one request."""
    _subject.set(replace(_subject.get(), **known))


@contextmanager
def log_context(**known: str) -> Iterator[None]:
    """For a part of a task. Not around a ``yield`` of an async generator, which may be closed by
    another task."""
    token = _subject.set(replace(_subject.get(), **known))
    try:
        yield
    finally:
        _subject.reset(token)


def checked_request_id(given: str) -> str:
    """``given``, or nothing when it cannot be an id: it comes from outside."""
    return given if _REQUEST_ID.fullmatch(given) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What a process logs, how, and what every line of it says about the process. ``rank`` is
    empty for a head."""

    form: str = TEXT
    level: str = "info"
    role: str = ""
    node_id: str = ""
    rank: str = ""


class _Handler(logging.StreamHandler[TextIO]):
    """The process's one handler; it remembers its settings, for the processes that it starts."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.stderr)
        self.settings = settings
        self.setFormatter(_JsonLines(settings) if settings.form == JSON else _TextLines(settings))


def setup_logging(settings: LogSettings) -> None:
    """Call once, in a process's main."""
    root = logging.getLogger()
    root.handlers[:] = [_Handler(settings)]
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.getLogger("tandem").setLevel(level)
    root.setLevel(max(level, logging.INFO))  # the libraries' debugging is not ours


def log_settings() -> LogSettings:
    """The settings of this process; the defaults when a program that embeds Tandem logs itself."""
    ours = (h.settings for h in logging.getLogger().handlers if isinstance(h, _Handler))
    return next(ours, LogSettings())


def logger(part: str) -> logging.Logger:
    """The logger of a part, for instance ``router`` or ``decode``."""
    return logging.getLogger(f"tandem.{part}")


class RateLimitedFilter(logging.Filter):
    """Of each kind of warning one line in ``QUIET_SECONDS``, and in the next one how many were left
    out: what strangers can cause must not fill a log. A kind is a place in the code."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told: dict[tuple[str, int], float] = {}
        self._left_out: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        kind, now = (record.pathname, record.lineno), self._clock()
        if now - self._told.get(kind, -inf) < QUIET_SECONDS:
            self._left_out[kind] += 1
            return False
        self._told[kind] = now
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{record.getMessage()} ({left_out} more were left out)"
            record.args = None
        return True


class _TextLines(logging.Formatter):
    """For people: a record's ``words`` stand behind its message, and the subject in brackets.

    Names and reasons come from other processes too: what would begin a line of its own, or move the
    cursor of a terminal, is written out. The lines of a traceback are indented, so that a record is
    everything up to the next line that begins with a date.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        self._process = f"{settings.node_id} rank {settings.rank}" if settings.rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _printable(super().formatMessage(record))
        about = current_log_context()
        words = [
            self._process,
            f"request {about.request_id}" if about.request_id else "",
            f"transfer {about.transfer_id}/{about.attempt}" if about.transfer_id else "",
        ]
        shown = ", ".join(word for word in words if word)
        details = _printable(getattr(record, "words", ""))
        return " ".join(filter(None, (line, details, f"[{shown}]" if shown else "")))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + _printable(line) for line in lines)


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class _JsonLines(logging.Formatter):
    """For programs: one object a line, whatever a message has in it. A record's ``fields`` stand
    beside its message."""

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
            **current_log_context().known(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
