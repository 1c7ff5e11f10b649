"""The Registry service: nodes join, send heartbeats and leave."""

from __future__ import annotations

import asyncio
import secrets
import time
import urllib.parse
from pathlib import Path
from typing import Any

import grpc

from ..proto import tandem_pb2 as pb
from ..proto.tandem_pb2_grpc import RegistryServicer
from ..shared.errors import ModelError, UnavailableError
from ..shared.telemetry import logger
from .model import ServedModel, sampling_defaults
from .nodes import NodeTable
from .options import RouterOptions

log = logger("router")

WILDCARDS = ("", "0.0.0.0", "[::]", "::")
MAX_NAME = 256


class Registry(RegistryServicer):
    """Owns the node table and the model that all its nodes serve."""

    def __init__(self, options: RouterOptions, nodes: NodeTable) -> None:
        self._options = options
        self._nodes = nodes
        self._epoch = secrets.randbits(64)
        self._tokenizer: Any = None
        self._tokenizer_path: Path | None = None
        self._fingerprint = ""
        self._model: ServedModel | None = None
        self._loading = asyncio.Lock()

    def model(self) -> ServedModel:
        """What is served now; ``UnavailableError`` before the first decode node has joined."""
        if self._model is None or not self._nodes.decode_ready():
            raise UnavailableError("No decode node has joined this router yet; try again soon.")
        return self._model

    async def preload(self) -> None:
        """Read the tokenizer at start when the operator has said where it is."""
        if self._options.model_path is not None:
            await self._load(self._options.model_path, "")

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        problem = self._problem(request)
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        # One at a time: the first brings the model, and the others are compared with it.
        async with self._loading:
            conflict = self._conflict(request.model)
            if conflict:
                log.warning("node %s refused: %s", request.node_id, conflict)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, conflict)
            try:
                await self._load(
                    self._options.model_path or Path(request.model.path), request.model.fingerprint
                )
            except ModelError as error:
                message = f"the router cannot read the model's tokenizer: {error}"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            self._nodes.join(request, _reachable(request.address, context.peer()))
            self._fingerprint = request.model.fingerprint
            self._update_model()
        return pb.JoinReply(
            router_epoch=self._epoch, heartbeat_seconds=self._options.heartbeat_seconds
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        return pb.HeartbeatReply(known=self._nodes.heartbeat(request))

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        self._nodes.leave(request.node_id, request.epoch)
        return pb.LeaveReply()

    async def watch(self) -> None:
        """Loses silent nodes, for as long as the router runs."""
        while True:
            await asyncio.sleep(min(0.25, self._options.node_timeout / 4))
            before = len(self._nodes)
            self._nodes.expire()
            await self._nodes.close_lost()
            if len(self._nodes) != before:
                self._update_model()

    def _problem(self, request: pb.JoinRequest) -> str | None:
        if not 0 < len(request.node_id) <= MAX_NAME:
            return f"node_id must have 1 to {MAX_NAME} characters"
        if request.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            return "role must be prefill or decode"
        host, _, port = request.address.rpartition(":")
        if not port.isdigit() or not 0 < int(port) < 65536 or len(host) > MAX_NAME:
            return f"address must be host:port, not {request.address[:MAX_NAME]!r}"
        if request.role == pb.ROLE_DECODE and not request.model.max_model_len:
            return "a decode node's model card needs max_model_len"
        known = any(node.node_id == request.node_id for node in self._nodes)
        if not known and len(self._nodes) >= self._options.max_nodes:
            return f"this router takes at most {self._options.max_nodes} nodes"
        return None

    def _conflict(self, card: pb.ModelCard) -> str | None:
        """Nodes of two models must never meet; when all have gone, another model may come."""
        if not len(self._nodes) or card.fingerprint == self._fingerprint:
            return None
        return (
            f"this cluster serves the model with fingerprint {self._fingerprint!r}; the node has "
            f"{card.fingerprint!r} ({card.name!r}). Start it with the same model, or join another "
            "router."
        )

    async def _load(self, path: Path, fingerprint: str) -> None:
        """Once a model: a second node's folder may lie elsewhere, on its own machine."""
        known = path == self._tokenizer_path or fingerprint == self._fingerprint
        if self._tokenizer is not None and known:
            return
        from ..shared.text.tokenizer import Tokenizer

        self._tokenizer = await asyncio.to_thread(Tokenizer.load, path)
        self._tokenizer_path = path

    def _update_model(self) -> None:
        decode = [n for n in self._nodes if n.role == pb.ROLE_DECODE]
        if not decode:
            return
        card = decode[0].model
        names = self._options.served_model_names or (card.name,)
        self._model = ServedModel(
            names=names,
            fingerprint=card.fingerprint,
            max_model_len=min(node.model.max_model_len for node in decode),
            vocab_size=card.vocab_size or self._tokenizer.vocab_size,
            created=self._model.created if self._model else int(time.time()),
            tokenizer=self._tokenizer,
            defaults=sampling_defaults(self._tokenizer.generation_config),
        )


def _reachable(address: str, peer: str) -> str:
    """A node that listens on every interface is reached where its join came from."""
    host, _, port = address.rpartition(":")
    if host not in WILDCARDS:
        return address
    # gRPC writes peers as ipv4:1.2.3.4:567 or ipv6:%5B::1%5D:567.
    peer_host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return f"{peer_host or '127.0.0.1'}:{port}"
