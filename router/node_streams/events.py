"""The events of one request of a decode node, and its end."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from ...proto import tandem_pb2 as pb


@dataclass(slots=True)
class PlainTokens:
    """New tokens of one choice, without logprobs: nearly all events are of this kind, and to read
    a message for each would take several times as long."""

    index: int
    tokens: list[int]


NodeEvent = PlainTokens | pb.GenerateEvent


class RequestFailedError(Exception):
    """A request has failed with this status of gRPC. ``answered``: the node itself has said so, and
    the way to it is not the cause."""

    def __init__(self, code: grpc.StatusCode, details: str, *, answered: bool = False) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.answered = answered
