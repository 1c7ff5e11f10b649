"""The connection to one node: its gRPC channel, and this router's requests on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import DecodeStub
from ...shared.security.credentials import LASTING, Credentials
from ...shared.telemetry.tracing import Metadata
from .remote_request import RemoteRequest
from .stream import NodeStream

END_CHOICE_SECONDS = 5.0
# A lost first packet is sent again after a second.
RECONNECT_SECONDS = 1.5
_CLOSED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)

CHANNEL_OPTIONS = (
    *LASTING,
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)

if TYPE_CHECKING:
    from ...proto.tandem_pb2_grpc import DecodeAsyncStub


class _Running(NamedTuple):
    """A request's number of sequences, and its channel."""

    sequences: int
    channel: grpc.aio.Channel


class NodeConnection:
    """Opens the channel on demand. ``sequences`` is the number in all running requests."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._generation = 0  # of the credentials when the channel was opened
        self._stream: NodeStream | None = None  # for new requests
        self._stream_channel: grpc.aio.Channel | None = None
        self._retired: list[NodeStream] = []  # on older channels, until their last requests end
        self._running: dict[RemoteRequest, _Running] = {}
        self._ending: set[Any] = set()  # EndChoice RPCs
        self.sequences = 0
        self._peak_sequences = 0

    @property
    def requests(self) -> int:
        """The number of running requests."""
        return len(self._running)

    def take_peak(self) -> int:
        """The largest number of sequences at any time since the previous invocation."""
        peak, self._peak_sequences = self._peak_sequences, self.sequences
        return peak

    def generate(self, request: pb.GenerateRequest, metadata: Metadata) -> RemoteRequest:
        """Start a request; ``end`` must follow. The node ends it at its deadline."""
        stub = self._stub()
        assert self._channel is not None
        reuses = self._channel.get_state() is grpc.ChannelConnectivity.READY
        remote = self._open_stream(stub).begin(request, metadata, reuses=reuses)
        self._running[remote] = running = _Running(max(1, request.sampling.n), self._channel)
        self.sequences += running.sequences
        self._peak_sequences = max(self._peak_sequences, self.sequences)
        return remote

    def _open_stream(self, stub: DecodeAsyncStub) -> NodeStream:
        stream = self._stream
        if stream is not None and self._stream_channel is not self._channel:
            self._retired = [each for each in (*self._retired, stream) if not each.over]
            stream.retire()
            stream = None
        if stream is None or stream.over:
            stream = self._stream = NodeStream(stub.Stream())  # type: ignore[call-arg]  # written to
            self._stream_channel = self._channel
            stream.start()
        return stream

    async def reconnect(self, remote: RemoteRequest) -> bool:
        """Replace the connection of this request; false if that takes too long. The first of the
        requests that lost a connection opens another channel, since the old one is slow to
        notice."""
        if self._running[remote].channel is self._channel:
            self._channel = None
        self._stub()
        channel = self._channel
        assert channel is not None
        try:
            async with asyncio.timeout(RECONNECT_SECONDS):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state in _CLOSED:
                        return False
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        # the channel was closed, because the node is lost
        except (TimeoutError, grpc.aio.UsageError):
            return False
        return True

    def end(self, remote: RemoteRequest) -> None:
        """Cancel a request unless it has ended, and stop counting it."""
        remote.cancel()
        self.sequences -= self._running.pop(remote).sequences

    def end_choice(self, internal_id: int, index: int) -> None:
        """End one choice of a request on the node. Does not wait for the reply, since it may come
        too late to have an effect."""
        if self._channel is not None:
            stub = self._credentials.stub(DecodeStub, self._channel)
            request = pb.EndChoiceRequest(internal_id=internal_id, index=index)
            rpc = stub.EndChoice(request, timeout=END_CHOICE_SECONDS)
            self._ending.add(rpc)  # gRPC cancels an RPC without a reference
            rpc.add_done_callback(self._ending.discard)

    def cancel(self) -> None:
        """Cancel all requests; their readers get ``RequestFailedError``."""
        for remote in tuple(self._running):
            remote.cancel()

    async def close(self) -> None:
        """Close the streams and the channel."""
        for stream in (*self._retired, *filter(None, [self._stream])):
            await stream.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _stub(self) -> DecodeAsyncStub:
        if self._channel is None or self._generation != self._credentials.generation:
            # An older channel closes when its last request ends.
            self._generation = self._credentials.generation
            self._channel = self._credentials.channel(self._address, CHANNEL_OPTIONS)
        return self._credentials.stub(DecodeStub, self._channel)
