"""The logprobs that nodes send, unpacked only where they are formatted."""

from __future__ import annotations

from collections.abc import Collection

from ...proto import tandem_pb2 as pb
from ...proto.packed_logprobs import ENTRY_BYTES, unpack_logprobs
from ..errors import NodeError


def check_logprobs(positions: Collection[pb.PositionLogprobs], tokens: int | None = None) -> None:
    """Raise ``NodeError`` if logprobs are malformed, or present for a number of positions other
    than ``tokens``."""
    if positions and tokens is not None and len(positions) != tokens:
        raise NodeError(f"The node sent {tokens} tokens with the logprobs of {len(positions)}.")
    if any(len(position.packed_top) % ENTRY_BYTES for position in positions):
        raise NodeError("The node sent logprobs of an invalid length.")


def alternatives(position: pb.PositionLogprobs) -> list[tuple[int, float]]:
    """The listed tokens with their logprobs."""
    return unpack_logprobs(position.packed_top)


def count_alternatives(position: pb.PositionLogprobs) -> int:
    """The number of alternatives."""
    return len(position.packed_top) // ENTRY_BYTES
