"""The events of one request on a decode node, and its failure."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from ...proto import tandem_pb2 as pb


@dataclass(slots=True)
class PlainTokens:
    """New tokens of one choice, without logprobs. Nearly all events are of this kind, and a
    protobuf message for each would take several times as long to read."""

    index: int
    tokens: list[int]


NodeEvent = PlainTokens | pb.GenerateEvent


class RequestFailedError(Exception):
    """A request failed with this gRPC status. ``by_node``: the node itself reported it, so the
    connection is not the cause."""

    def __init__(self, code: grpc.StatusCode, details: str, *, by_node: bool = False) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.by_node = by_node
