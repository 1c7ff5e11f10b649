"""A process with one model, which measures what it is told: a side of a comparison."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import NoReturn


class RateProcess:
    """A command that reads a line for each figure, and replies with a line of the figure."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self._name = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )

    def rate(self, *question: object) -> float:
        """Tokens a second. Raises ``RuntimeError`` if the process has ended."""
        self._ask(*question)
        assert self._process.stdout is not None
        return float(self._process.stdout.readline() or self._fail())

    def _ask(self, *question: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, question)).encode() + b"\n")
        self._process.stdin.flush()

    def _fail(self) -> NoReturn:
        raise RuntimeError(f"{self._name} ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
