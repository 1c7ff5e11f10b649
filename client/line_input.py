"""Input from a terminal, with editing, history and completion by readline."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

MAX_LINES = 1000
# Delimits a message of several lines.
QUOTES = '"""'
PROMPT, CONTINUED = "> ", ". "


def history_path() -> Path:
    """The file of the history, in XDG's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "tandem" / "chat_history"


class LineInput:
    """Reads messages of one or more lines."""

    def __init__(self, read_line: Callable[[str], str] = input) -> None:
        self._read_line = read_line
        self._interactive = sys.stdin.isatty()

    def read(self) -> str:
        """Read a message: a line, several lines joined by backslashes, or a block in triple quotes.
        Raises ``EOFError`` and ``KeyboardInterrupt``."""
        line = self._line(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._block(line.lstrip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(CONTINUED))
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self._line(CONTINUED))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        return self._read_line(prompt if self._interactive else "")


@contextlib.contextmanager
def line_editing(words: Sequence[str], *, keep: bool) -> Iterator[None]:
    """Enable line editing during the block, with completion of ``words``. If ``keep``, lines are
    kept in a file that only this user can read."""
    try:
        import readline
    except ImportError:  # not on Windows; lines are read without editing
        yield
        return

    def complete(text: str, state: int) -> str | None:
        matches = [word for word in words if word.startswith(text)] if text.startswith("/") else []
        return matches[state] if state < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    path = history_path()
    if keep:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(MAX_LINES)
    length = readline.get_current_history_length()
    try:
        yield
    finally:
        if keep:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                _append_history(readline, readline.get_current_history_length() - length, path)


def _append_history(readline: ModuleType, count: int, path: Path) -> None:
    """Append the last ``count`` lines, so that those of concurrent chats are kept too."""
    if hasattr(readline, "append_history_file"):
        readline.append_history_file(count, path)
    else:  # an older libedit
        readline.write_history_file(path)
