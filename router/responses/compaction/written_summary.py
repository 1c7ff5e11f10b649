"""A summary while the model writes it."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from ...generation import ChoiceDelta, Output, RequestAdmitted


class WrittenSummary:
    """Collects the tokens and the text of a summary."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = StringIO()
        self._admitted = False

    def take(self, outputs: Sequence[Output]) -> bool:
        """Add outputs. Returns true for those with which the request is first admitted."""
        first = False
        for output in outputs:
            match output:
                case RequestAdmitted():
                    first, self._admitted = not self._admitted, True
                case ChoiceDelta():
                    self.text.write(output.text)
                    self.tokens += output.tokens
        return first
