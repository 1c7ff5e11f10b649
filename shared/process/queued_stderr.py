"""Standard error that never waits for its reader.

A pipe without a reader, a terminal after Ctrl-S or a stuck log driver would otherwise stop the
thread that logs, which is often the event loop, and with it all requests. So text is queued, and a
thread writes it. Text beyond the queue's limit is dropped, and its lines are counted.

``sys.stderr`` as a whole is replaced: logs, warnings, tracebacks and the error that ends a command
keep their order.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque

log = logging.getLogger("tandem.process")

# Some twenty thousand lines. Once the queue is full, text is dropped until half of it is written.
MAX_BYTES = 4 << 20
# A longer line is queued in parts.
MAX_PARTIAL = 64 << 10
# Wait for the last lines to be written.
END_SECONDS = 2.0


class QueuedStderr(io.TextIOBase):
    """A text stream to a file descriptor, written by a thread that starts with the first text."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0  # lines, since the start
        self._descriptor = descriptor
        self.begin_again()

    def begin_again(self) -> None:
        """Empty the queue, which after a fork the parent writes."""
        # Reentrant, because signal handlers and finalizers print as well.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[bytes] = deque()
        self._unwritten = 0  # bytes
        self._partial = ""  # a line without its end
        self._dropping = False
        self._unreported = 0  # dropped lines that are not reported yet
        self._in_line = False  # the rest of a line could not be written
        self._thread: threading.Thread | None = None
        self._ended = False

    # ---- a text stream -------------------------------------------------------------------------

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # After the end, without the lock: a thread that Python has stopped may hold it.
        if self._ended:
            self._write_last(text)
            return len(text)
        with self._changed:
            whole, end, self._partial = (self._partial + text).rpartition("\n")
            if end:
                self._put(whole + end)
            if len(self._partial) > MAX_PARTIAL:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Queue a line without its end, if there is one. Does not wait."""
        if self._ended:
            return
        with self._changed:
            if self._partial:
                self._put(self._partial)
                self._partial = ""

    # ---- the queue -----------------------------------------------------------------------------

    def end(self, seconds: float = END_SECONDS) -> None:
        """Wait up to ``seconds`` until everything is written. Later text is written directly, or
        dropped if that would block."""
        self.flush()
        due = time.monotonic() + seconds
        with self._changed:
            while self._unwritten and (remaining := due - time.monotonic()) > 0:
                self._changed.wait(remaining)
            self._dropping = bool(self._unwritten)
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None and not self._dropping:
            self._thread.join(seconds)

    def _put(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors)
        full = bool(self._unwritten) and self._unwritten + len(data) > MAX_BYTES
        if self._dropping or full:
            self._dropping = True
            self._drop(data)
        elif self._has_thread():
            self._queue.append(data)
            self._unwritten += len(data)
            self._changed.notify_all()
        else:
            self._write(data)

    def _has_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # too many threads, or Python is ending
                self._thread = None
        return self._thread is not None

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            succeeded = self._write(piece)
            with self._changed:
                self._unwritten -= len(piece)
                if self._unwritten <= MAX_BYTES // 2 and not self._ended:
                    self._dropping = False
                missing = self._unreported if succeeded and not self._dropping else 0
                self._unreported -= missing
                self._changed.notify_all()
            if missing:
                log.warning("%d lines of this log are missing: they could not be written", missing)

    def _next(self) -> bytes | None:
        """Wait for the next piece to write; ``None`` at the end."""
        with self._changed:
            while not self._queue and not self._ended:
                self._changed.wait()
            if not self._queue:
                return None
            piece = self._queue.popleft()
            # Writes of up to PIPE_BUF bytes are atomic, so processes that share a pipe do not mix
            # their lines.
            while self._queue and len(piece) + len(self._queue[0]) <= select.PIPE_BUF:
                piece += self._queue.popleft()
            return piece

    def _write(self, data: bytes) -> bool:
        """Write, waiting for room. If the disk is full or the reader is gone, drop the rest and
        return false."""
        rest = memoryview(b"\n" + data if self._in_line else data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
                self._in_line = False
            except BlockingIOError:  # another process that shares the file made it non-blocking
                with contextlib.suppress(OSError):
                    select.select([], [self._descriptor], [], 1.0)
            except OSError:
                self._in_line = self._in_line or len(rest) < len(data)
                self._drop(rest[-len(data) :])  # without the newline put before it
                return False
        return True

    def _write_last(self, text: str) -> None:
        if not self._dropping and select.select([], [self._descriptor], [], 0)[1]:
            self._write(text.encode(self.encoding, self.errors))

    def _drop(self, data: bytes | memoryview) -> None:
        lines = max(1, bytes(data).count(b"\n"))
        self.dropped += lines
        self._unreported += lines


def queue_stderr() -> None:
    """Replace ``sys.stderr`` for the life of this process, if it is a file."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError):  # closed, or in the memory of a test
        return
    if not isinstance(sys.stderr, QueuedStderr):
        sys.stderr.flush()
        sys.stderr = stream = QueuedStderr(descriptor)
        atexit.register(stream.end)
        os.register_at_fork(after_in_child=stream.begin_again)


def end_stderr() -> None:
    """Wait until everything queued is written, before an ``os._exit``."""
    if isinstance(sys.stderr, QueuedStderr):
        sys.stderr.end()


def dropped_lines() -> int:
    """Number of lines that this process could not log."""
    return sys.stderr.dropped if isinstance(sys.stderr, QueuedStderr) else 0
