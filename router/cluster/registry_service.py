"""The Registry service: nodes join, send heartbeats and leave; operators list and command them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.roles import ROLES, role_name
from ...proto.tandem_pb2_grpc import RegistryServicer
from ...shared.config.sampling_defaults import read_defaults
from ...shared.errors import ModelError, PeerRefusedError, RequestError, UnavailableError
from ...shared.host_port import is_wildcard, split_host_port
from ...shared.process.open_files import open_file_limit, open_files
from ...shared.security.addresses import is_host_port
from ...shared.telemetry.logs import logger
from ...shared.version import version
from ..options import RouterOptions
from ..served_model import ServedModel, system_fingerprint
from .absent_nodes import MAX_ABSENT, MAX_REASON
from .groups import conflict, difference, text_of
from .node import Node
from .node_commands import MAX_NAME, NodeCommands, UnknownNodeError
from .node_table import NodeTable
from .node_tokenizer import tokenizer_of
from .pinned_model import PinnedModel, load_tokenizer
from .reachability import Reachability, UnreachedError

if TYPE_CHECKING:
    from ...shared.text.tokenizer import Tokenizer

log = logger("router")

# At most one line per this time, so that repeated joins do not fill the log.
QUIET_SECONDS = 10.0


class Registry(RegistryServicer):
    """Owns the model that all nodes serve, and controls the node table."""

    def __init__(self, options: RouterOptions, nodes: NodeTable) -> None:
        self._options = options
        self.started = time.time()
        self._defaults = read_defaults(options)
        self._nodes = nodes
        self.commands = NodeCommands(options, nodes)
        self.reachability = Reachability(nodes, nodes.credentials)
        self._epoch = secrets.randbits(64)
        self._tokenizer: Tokenizer | None = None
        self._pinned: PinnedModel | None = None
        self._loading: tuple[tuple[str, ...], asyncio.Task[Tokenizer]] | None = None
        self._model: ServedModel | None = None
        self._entering = asyncio.Lock()
        self._logged_at = -inf
        # All nodes may be lost at once.
        nodes.absent.capacity = max(MAX_ABSENT, options.max_nodes)

    def pin(self, model: PinnedModel | None) -> None:
        """Admit only nodes of this model; with ``None`` the first node decides."""
        self._pinned = model
        self._tokenizer = model.tokenizer if model is not None else None

    def model(self) -> ServedModel:
        """The served model. Raises ``UnavailableError`` while no decode node takes work."""
        self.check_started()
        if self._model is None or not self._nodes.decode_ready():
            raise UnavailableError("No decode node takes requests at the moment; try again soon.")
        return self._model

    def served_name(self) -> str:
        """The name of the served model; empty until the first decode node has joined."""
        return self._model.name if self._model is not None else ""

    def check_started(self) -> None:
        """Raise ``UnavailableError`` until the first decode node has joined."""
        if self._model is None:
            raise UnavailableError("No decode node has joined this router yet; try again soon.")

    def check_ready(self) -> None:
        """Raise ``UnavailableError`` unless a request would reach a decode node."""
        self.model()
        if not self._nodes.decode_reachable():
            raise UnavailableError(
                "This router can reach none of its decode nodes; its log and tandem doctor say why."
            )

    def unready(self) -> str:
        """The reason why ``check_ready`` would raise; empty if it would not."""
        try:
            self.check_ready()
        except UnavailableError as error:
            return str(error)
        return ""

    async def enter(self, request: pb.JoinRequest, address: str, *, met: bool = False) -> None:
        """Admit a node that asks to join or that --pd-url lists. It is probed first, unless the
        router has just ``met`` it there.

        Raises ``RequestError`` for an invalid request, ``PeerRefusedError`` for a node that does
        not belong to this cluster, and ``UnreachedError`` for one that cannot be reached.
        """
        try:
            if problem := self._problem(request):
                raise RequestError(problem)
            self._check_model(request.model, address)
            await self._check_name(request, address)
            if not met and not self._is_present(request, address):
                await self.reachability.meet(request.node_id, request.epoch, request.role, address)
            # One at a time: the first defines the model, and the others are compared with it.
            async with self._entering:
                await self._admit(request, address)
        except (PeerRefusedError, RequestError, UnreachedError) as error:
            self._note_refusal(request, address, str(error))
            raise

    def _is_present(self, request: pb.JoinRequest, address: str) -> bool:
        """True if this start of the node is already here with this address and role. Nodes of
        --pd-url are polled, and need no probe either."""
        node = self._nodes.get(request.node_id, request.epoch)
        same = node is not None and (node.address, node.role) == (address, request.role)
        return same or address in self._options.prefill_addresses

    async def _admit(self, request: pb.JoinRequest, address: str) -> None:
        self._check_model(request.model, address)  # another node may have joined meanwhile
        if request.role == pb.ROLE_DECODE:
            await self._load_tokenizer(request.model, address)
        self._nodes.join(request, address)
        for node in self._nodes:
            if node.address == address and node.node_id != request.node_id:
                self.reachability.doubt(node)
        self._update_model()

    def _note_refusal(self, request: pb.JoinRequest, address: str, reason: str) -> None:
        """Count and record a refusal, and log it if it is new: refused nodes keep retrying."""
        absent, name = self._nodes.absent, request.node_id
        printable = _printable(address)[:MAX_NAME]
        last_reason = absent.reason(name)
        if _name_problem(request) or (absent.full and not last_reason):
            absent.refused.labels(role_name(request.role)).inc()
            self._log_unlisted(printable, reason)
            return
        absent.add(
            pb.AbsentNode(
                node_id=name, role=request.role, address=printable, refused=True, reason=reason
            )
        )
        if absent.reason(name) != last_reason:
            log.warning("node %s at %s is refused: %s", name, printable, absent.reason(name))

    def _log_unlisted(self, address: str, reason: str) -> None:
        """Log a refusal that is not recorded, so that it may not be new."""
        now = self._nodes.now()
        if now - self._logged_at >= QUIET_SECONDS:
            self._logged_at = now
            log.warning("a node at %s is refused: %s; more are only counted", address, reason)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        try:
            await self.enter(request, request.address)
        except RequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except UnreachedError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except PeerRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.JoinReply(
            router_epoch=self._epoch,
            heartbeat_seconds=self._options.heartbeat_period,
            prefix_version=self._nodes.prefix_version(request.node_id, request.epoch),
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        node = self._nodes.heartbeat(request)
        if node is None:
            return pb.HeartbeatReply(known=False)
        return pb.HeartbeatReply(
            known=True,
            drain=node.to_drain,
            drain_seconds=node.drain_seconds,
            prefix_version=node.prefixes.version,
            role=node.next_role,
            unreachable=node.unreachable,
        )

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        failure = " ".join(request.failure[:MAX_REASON].split())
        self._nodes.leave(request.node_id, request.epoch, _printable(failure))
        self._update_model()
        return pb.LeaveReply()

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        return pb.ListReply(
            nodes=self._nodes.infos(),
            absent=self._nodes.absent.all(),
            version=version(),
            heartbeat_seconds=self._options.heartbeat_period,
            open_files=open_files(),
            open_file_limit=open_file_limit(),
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        seconds = request.timeout_seconds if request.HasField("timeout_seconds") else None
        await self._command(context, lambda: self.commands.drain(request.node_id, seconds))
        return pb.DrainReply()

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleReply:
        def switch() -> None:
            self.commands.set_role(request.node_id, request.role, force=request.force)

        await self._command(context, switch)
        return pb.SetRoleReply()

    async def _command(self, context: Any, command: Callable[[], None]) -> None:
        """Run an operator's command. Aborts the RPC if it is refused."""
        try:
            command()
        except UnknownNodeError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except RequestError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def watch(self) -> None:
        """Expire silent nodes until cancelled."""
        pause = min(0.25, self._options.node_timeout / 4)
        try:
            while True:
                start = time.monotonic()
                await asyncio.sleep(pause)
                count = len(self._nodes)
                self._nodes.expire(held_up=time.monotonic() - start - pause)
                await self._nodes.close_lost()
                if len(self._nodes) != count:
                    self._update_model()
        finally:
            await self.reachability.close()

    def _problem(self, request: pb.JoinRequest) -> str:
        if problem := _name_problem(request):
            return problem
        if not request.address.isprintable():
            return "address must be printable"
        is_static = request.address in self._options.prefill_addresses
        if not is_static and not is_host_port(request.address):
            return f"address must be host:port, not {request.address[:MAX_NAME]!r}"
        if not is_static and is_wildcard(split_host_port(request.address)[0]):
            return f"address {request.address} is a wildcard, which leads to no node"
        if request.role == pb.ROLE_DECODE and not request.model.max_model_len:
            return "a decode node's model card needs max_model_len"
        is_new = self._nodes.find(request.node_id) is None
        if is_new and len(self._nodes) >= self._options.max_nodes:
            return f"this router takes at most {self._options.max_nodes} nodes; see its --max-nodes"
        return ""

    def _check_model(self, card: pb.ModelCard, address: str) -> None:
        """Raise ``PeerRefusedError`` for a model that does not belong here."""
        if refusal := self._conflict(card, address):
            raise PeerRefusedError(refusal)

    def _conflict(self, card: pb.ModelCard, address: str) -> str:
        is_static = address in self._options.prefill_addresses
        if not is_static and self._nodes.serves(card.fingerprint):
            return ""  # the usual case; comparing with each node is slow in a large cluster
        decode = [node.model for node in self._nodes if not node.is_prefill]
        # A node of --pd-url is useful only to the present decode nodes.
        if decode and is_static:
            if all(card.fingerprint != other.fingerprint for other in decode):
                return (
                    f"different models: {difference(decode[0], card)} on the node ({card.name!r}); "
                    f"start it with the cluster's model"
                )
            return ""
        pinned = [self._pinned.card] if self._pinned is not None else []
        # Nodes of --pd-url stay when the decode nodes go, and do not decide which come next.
        static = self._options.prefill_addresses
        prefill = [n.model for n in self._nodes if n.is_prefill and n.address not in static]
        return conflict([*pinned, *decode, *prefill], card)

    async def _check_name(self, request: pb.JoinRequest, address: str) -> None:
        """Raise ``PeerRefusedError`` if another live process has this node's name.

        A restart is no conflict: it has its predecessor's address, or the predecessor has left or
        no longer replies.
        """
        other = self._nodes.find(request.node_id)
        if other is None or other.epoch == request.epoch or other.address == address or other.left:
            return
        if await self._is_alive(other):
            raise PeerRefusedError(
                f"two nodes are called {request.node_id!r}: one at {other.address}, which answers, "
                f"and one at {address}; give one of them another --node-id, or stop the other"
            )

    async def _is_alive(self, node: Node) -> bool:
        """True if this start of a node is at its address, or if that cannot be determined."""
        try:
            await self.reachability.meet(node.node_id, node.epoch, node.role, node.address)
        except PeerRefusedError:
            return False
        except UnreachedError as error:
            return not error.gone
        return True

    async def _load_tokenizer(self, card: pb.ModelCard, address: str) -> None:
        """Load the tokenizer once for each model, from whichever node comes first."""
        if self._pinned is not None:
            return
        text = text_of(card)
        if self._loading is None or self._loading[0] != text:
            self._loading = text, asyncio.create_task(self._tokenizer_of(card, address))
        try:
            # Shielded from a join that times out, so that the next one finds it loaded.
            self._tokenizer = await asyncio.shield(self._loading[1])
        except Exception as error:
            self._loading = None  # a folder that cannot be read now may be readable later
            if not isinstance(error, ModelError):
                log.exception("loading the tokenizer of %r failed", card.path)
            message = f"the router cannot use the model's tokenizer: {error}"
            raise PeerRefusedError(message) from None

    async def _tokenizer_of(self, card: pb.ModelCard, address: str) -> Tokenizer:
        files = await tokenizer_of(card, address, self._nodes.credentials)
        return await load_tokenizer(files, card.vocab_size, self._options)

    def _update_model(self) -> None:
        decode = [n for n in self._nodes if n.role == pb.ROLE_DECODE]
        if not decode or self._tokenizer is None:
            return
        card = decode[0].model
        name, *aliases = self._options.served_names or (card.name,)
        self._model = ServedModel(
            name=name,
            aliases=tuple(aliases),
            max_model_len=min(node.model.max_model_len for node in decode),
            vocab_size=card.vocab_size or self._tokenizer.vocab_size,
            created=int(self.started),
            tokenizer=self._tokenizer,
            system_fingerprint=system_fingerprint(name, card.fingerprint),
            defaults=self._defaults.for_model(self._tokenizer.generation_config),
            template_variables=self._options.template_variables,
            eos_token_ids=frozenset(card.eos_token_ids),
            scoring=card.scoring,
            labels=tuple(card.labels),
        )


def _name_problem(request: pb.JoinRequest) -> str:
    """The reason why a node's name and role cannot be displayed; empty if they can."""
    if not 0 < len(request.node_id) <= MAX_NAME:
        return f"node_id must have 1 to {MAX_NAME} characters"
    # It is printed on an operator's terminal (``tandem nodes``), like the address.
    if not request.node_id.isprintable():
        return "node_id must be printable"
    return "" if request.role in ROLES else "role must be prefill or decode"


def _printable(text: str) -> str:
    """A node's text, safe for logs and terminals."""
    return text if text.isprintable() else ascii(text)
