"""Absent nodes in words, for operators."""

from __future__ import annotations

from ...proto import tandem_pb2 as pb


def told(node: pb.AbsentNode) -> str:
    """What has become of an absent node, after its name."""
    ago = f"{node.seconds_ago:.0f} s ago"
    if node.refused:
        return f"was rejected {ago}: {node.reason}"
    if node.failed:
        what = f"left {ago}: {node.reason}"
    else:
        what = f"{node.reason} and was dropped {ago} (it was at {node.address})"
    return f"{what}; another start of it is here again" if node.returned else what
