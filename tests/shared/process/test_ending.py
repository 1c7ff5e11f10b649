"""Exit statuses in words."""

from __future__ import annotations

import pytest

from tandem.shared.process.ending import ending


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with exit status 0"),
        (143, "ended with exit status 143"),
        (-9, "was killed (SIGKILL), possibly for lack of memory"),
        (-11, "was killed (SIGSEGV)"),
        (-15, "was killed (SIGTERM)"),
        (-63, "was killed (signal 63)"),
    ],
)
def test_a_signal_is_named_and_a_status_is_a_number(status: int, words: str) -> None:
    assert ending(status) == words
