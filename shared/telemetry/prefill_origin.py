"""Labels of where and why a prompt was prefilled: a closed set, for metrics and logs."""

from __future__ import annotations

from enum import StrEnum

from ..causes import Cause

REMOTE, LOCAL = "remote", "local"


class LocalReason(StrEnum):
    """Reasons for local prefill without trying a prefill node."""

    NO_NODE = "no prefill node"
    REFUSED = "all prefill nodes refused"
    PROMPT_LOGPROBS = "prompt logprobs"
    POOLING = "pooling"
    NOTHING_MISSING = "nothing missing"
    SHORT = "below threshold"
    FASTER_HERE = "faster here"
    TOO_LATE_THERE = "too late there"
    PREEMPTED = "preempted"  # it was received, and lost its blocks before its first step
    OTHER = "other"


_FAILED = "failed: "


def failed(cause: Cause) -> str:
    """The reason if every prefill node failed, with the cause of the last attempt."""
    return f"{_FAILED}{cause}"


def known_reason(given: str) -> str:
    """``given`` if it is a known reason, else ``OTHER``: labels stay a closed set across
    versions."""
    if given.startswith(_FAILED):
        return failed(Cause(given.removeprefix(_FAILED)))
    return given if given in set(LocalReason) else LocalReason.OTHER
