"""Labels of where a prompt was prefilled."""

from __future__ import annotations

from tandem.shared.causes import Cause
from tandem.shared.telemetry.prefill_origin import LocalReason, failed, known_reason


def test_reasons_are_a_closed_set() -> None:
    for reason in (*LocalReason, *(failed(cause) for cause in Cause)):
        assert known_reason(reason) == reason
    assert known_reason("failed: by a newer version's word") == "failed: other"
    assert known_reason("a newer version's word") == known_reason("") == "other"
