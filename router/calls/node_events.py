"""The events of one call of a decode node, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from ...proto import tandem_pb2 as pb


@dataclass(slots=True)
class PlainTokens:
    """New tokens of one choice, without logprobs: nearly all events are of this kind, and to read
    a message for each would take several times as long."""

    index: int
    tokens: list[int]


NodeEvent = PlainTokens | pb.GenerateEvent


class CallFailedError(Exception):
    """A call has failed with this status of gRPC. ``answered``: the node itself has said so, and
    the way to it is not the cause."""

    def __init__(self, code: grpc.StatusCode, details: str, *, answered: bool = False) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.answered = answered


class GenerateCall(Protocol):
    """A request on a decode node. ``reuses``: its connection was there before it, and may have been
    dead already."""

    @property
    def reuses(self) -> bool: ...

    async def read(self) -> Sequence[NodeEvent]:
        """The next events, all that have arrived; empty at the end. Raises ``CallFailedError``."""

    def cancel(self) -> None:
        """End the call on its node, unless it has ended."""
