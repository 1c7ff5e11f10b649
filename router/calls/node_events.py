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
    """A call has failed with this status of gRPC."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class GenerateCall(Protocol):
    """A request on a decode node."""

    async def read(self) -> Sequence[NodeEvent]:
        """The next events, all that have arrived; empty at the end. Raises ``CallFailedError``."""

    def cancel(self) -> None:
        """End the call on its node, unless it has ended."""
