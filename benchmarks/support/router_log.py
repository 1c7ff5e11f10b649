"""What the router's log says about prompts that were prefilled remotely."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.tests.end_to_end.support.cluster import until

LINE = re.compile(r'prompt_tokens=(\d+) .*prefilled=remote .*first_token="([^"]*)"')


class RouterLog:
    """The lines about these prompts, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def next(self) -> dict[str, float]:
        """The phases of the next prompt's time to first token, in seconds."""
        until(lambda: len(self._lines()) > self._read, "the router to log the prompt")
        words = self._lines()[self._read].split()
        self._read += 1
        return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}

    def _lines(self) -> list[str]:
        return [phases for _, phases in LINE.findall(self._path.read_text())]
