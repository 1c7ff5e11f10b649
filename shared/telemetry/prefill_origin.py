"""Labels of metrics and logs for where and why a prompt was prefilled: a closed set."""

from __future__ import annotations

from enum import StrEnum

from ..causes import Cause

REMOTE, LOCAL = "remote", "local"


class LocalReason(StrEnum):
    """Reasons for local prefill without an attempt at a transfer."""

    NO_NODE = "no prefill node"
    REFUSED = "all prefill nodes refused"
    PROMPT_LOGPROBS = "prompt logprobs"
    POOLING = "pooling"
    NOTHING_MISSING = "nothing missing"
    SHORT = "below threshold"
    FASTER_HERE = "faster here"
    TOO_LATE_THERE = "too late there"
    PREEMPTED = "preempted"  # received, but lost its blocks before its first step
    OTHER = "other"


_FAILED = "failed: "


def failed(cause: Cause) -> str:
    """The reason if every prefill node failed, with the cause of the last attempt."""
    return f"{_FAILED}{cause}"


def known_reason(text: str) -> str:
    """``text`` if it is a known reason, else ``OTHER``, so that labels stay a closed set even with
    nodes of other versions."""
    if text.startswith(_FAILED):
        return failed(Cause(text.removeprefix(_FAILED)))
    return text if text in set(LocalReason) else LocalReason.OTHER
