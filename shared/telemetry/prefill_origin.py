"""Where a prompt was prefilled and why there: the closed set of words that metrics and logs use."""

from __future__ import annotations

from enum import StrEnum

from ..causes import Cause

REMOTE, LOCAL = "remote", "local"


class LocalReason(StrEnum):
    """Why a decode node prefilled a prompt itself without trying a prefill node."""

    NO_NODE = "no prefill node"
    REFUSED = "all prefill nodes refused"
    PROMPT_LOGPROBS = "prompt logprobs"
    NOTHING_MISSING = "nothing missing"
    SHORT = "below threshold"
    FASTER_HERE = "faster here"
    TOO_LATE_THERE = "too late there"
    OTHER = "other"


_FAILED = "failed: "


def failed(cause: Cause) -> str:
    """The reason when every prefill node was tried in vain; the cause is the last attempt's."""
    return f"{_FAILED}{cause}"


def known_reason(given: str) -> str:
    """``given`` if it is one of these reasons: another version's words must not become labels."""
    if given.startswith(_FAILED):
        return failed(Cause(given.removeprefix(_FAILED)))
    return given if given in set(LocalReason) else LocalReason.OTHER
