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

# Repeated joins must not fill the log.
QUIET_SECONDS = 10.0


class Registry(RegistryServicer):
    """Owns the node table and the model that all its nodes serve."""

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
        nodes.absent.most = max(MAX_ABSENT, options.max_nodes)

    def pin(self, model: PinnedModel | None) -> None:
        """Let only nodes of this model join; ``None`` lets the first node decide."""
        self._pinned = model
        self._tokenizer = model.tokenizer if model is not None else None

    def model(self) -> ServedModel:
        """The served model. Raises ``UnavailableError`` while no decode node takes work."""
        self.check_started()
        if self._model is None or not self._nodes.decode_ready():
            raise UnavailableError("No decode node takes requests at the moment; try again soon.")
        return self._model

    def served_name(self) -> str:
        """The name of the served model; empty until a decode node has joined for the first time."""
        return self._model.name if self._model is not None else ""

    def check_started(self) -> None:
        """Raise ``UnavailableError`` until a decode node has joined for the first time."""
        if self._model is None:
            raise UnavailableError("No decode node has joined this router yet; try again soon.")

    def check_ready(self) -> None:
        """Raise ``UnavailableError`` unless a request would reach a decode node."""
        self.model()
        if not self._nodes.decode_reachable():
            raise UnavailableError(
                "This router can call none of its decode nodes; its log and tandem doctor say why."
            )

    def unready(self) -> str:
        """Why ``check_ready`` would raise; empty if it would not."""
        try:
            self.check_ready()
        except UnavailableError as error:
            return str(error)
        return ""

    async def enter(self, request: pb.JoinRequest, address: str, *, met: bool = False) -> None:
        """Enter a node that has joined by itself, or that --pd-url names. It is called first,
        unless the router has just ``met`` it there.

        Raises ``RequestError`` for an invalid request, ``PeerRefusedError`` for a node that does
        not belong to this cluster, and ``UnreachedError`` for one that cannot be called.
        """
        try:
            if problem := self._problem(request):
                raise RequestError(problem)
            self._check_model(request.model, address)
            await self._check_name(request, address)
            if not met and not self._knows(request, address):
                await self.reachability.meet(request.node_id, request.epoch, request.role, address)
            # One at a time: the first brings the model, and the others are compared with it.
            async with self._entering:
                await self._take(request, address)
        except (PeerRefusedError, RequestError, UnreachedError) as error:
            self._note_refusal(request, address, str(error))
            raise

    def _knows(self, request: pb.JoinRequest, address: str) -> bool:
        """True if this start of the node is here with this address and role, and those of --pd-url
        are polled there."""
        node = self._nodes.get(request.node_id, request.epoch)
        known = node is not None and (node.address, node.role) == (address, request.role)
        return known or address in self._options.prefill_addresses

    async def _take(self, request: pb.JoinRequest, address: str) -> None:
        self._check_model(request.model, address)  # another one may have come first
        if request.role == pb.ROLE_DECODE:
            await self._load_tokenizer(request.model, address)
        self._nodes.join(request, address)
        for node in self._nodes:
            if node.address == address and node.node_id != request.node_id:
                self.reachability.doubt(node)
        self._update_model()

    def _note_refusal(self, request: pb.JoinRequest, address: str, reason: str) -> None:
        """Count a refusal, remember it, and log it if it is new: refused nodes try again and
        again."""
        absent, name = self._nodes.absent, request.node_id
        shown = _printable(address)[:MAX_NAME]
        known = absent.reason(name)
        if _name_problem(request) or (absent.full and not known):
            absent.refused.labels(role_name(request.role)).inc()
            self._log_unlisted(shown, reason)
            return
        absent.add(
            pb.AbsentNode(
                node_id=name, role=request.role, address=shown, refused=True, reason=reason
            )
        )
        if absent.reason(name) != known:
            log.warning("node %s at %s is refused: %s", name, shown, absent.reason(name))

    def _log_unlisted(self, address: str, reason: str) -> None:
        """Log a refusal that is not remembered, so that nothing tells whether it is new."""
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
        """Lose silent nodes, until cancelled."""
        pause = min(0.25, self._options.node_timeout / 4)
        try:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(pause)
                before = len(self._nodes)
                self._nodes.expire(held_up=time.monotonic() - begun - pause)
                await self._nodes.close_lost()
                if len(self._nodes) != before:
                    self._update_model()
        finally:
            await self.reachability.close()

    def _problem(self, request: pb.JoinRequest) -> str:
        if problem := _name_problem(request):
            return problem
        if not request.address.isprintable():
            return "address must be printable"
        named = request.address in self._options.prefill_addresses
        if not named and not is_host_port(request.address):
            return f"address must be host:port, not {request.address[:MAX_NAME]!r}"
        if not named and is_wildcard(split_host_port(request.address)[0]):
            return f"address {request.address} is where a node listens, and leads to none"
        if request.role == pb.ROLE_DECODE and not request.model.max_model_len:
            return "a decode node's model card needs max_model_len"
        known = self._nodes.named(request.node_id)
        if known is None and len(self._nodes) >= self._options.max_nodes:
            return f"this router takes at most {self._options.max_nodes} nodes; see its --max-nodes"
        return ""

    def _check_model(self, card: pb.ModelCard, address: str) -> None:
        """Raise ``PeerRefusedError`` for a model that does not belong here."""
        if refusal := self._conflict(card, address):
            raise PeerRefusedError(refusal)

    def _conflict(self, card: pb.ModelCard, address: str) -> str:
        named = address in self._options.prefill_addresses
        if not named and self._nodes.serves(card.fingerprint):
            return ""  # the usual case; comparing with each node takes long in a large cluster
        decode = [node.model for node in self._nodes if not node.is_prefill]
        # A node of --pd-url is of use only to the present decode nodes.
        if decode and named:
            if all(card.fingerprint != known.fingerprint for known in decode):
                return (
                    f"different models: {difference(decode[0], card)} on the node ({card.name!r}); "
                    f"start it with the cluster's model"
                )
            return ""
        pinned = [self._pinned.card] if self._pinned is not None else []
        # Those of --pd-url stay when the decode nodes go, and have no say in who comes next.
        static = self._options.prefill_addresses
        prefill = [n.model for n in self._nodes if n.is_prefill and n.address not in static]
        return conflict([*pinned, *decode, *prefill], card)

    async def _check_name(self, request: pb.JoinRequest, address: str) -> None:
        """Raise ``PeerRefusedError`` if another live process has the name of this one.

        A restart is no conflict: it has its predecessor's address, or that one has left or no
        longer answers.
        """
        known = self._nodes.named(request.node_id)
        if known is None or known.epoch == request.epoch or known.address == address or known.left:
            return
        if await self._is_alive(known):
            raise PeerRefusedError(
                f"two nodes are called {request.node_id!r}: one at {known.address}, which answers, "
                f"and one at {address}; give one of them another --node-id, or stop the other"
            )

    async def _is_alive(self, node: Node) -> bool:
        """True if this start of a node is at its address, or if nothing can be told."""
        try:
            await self.reachability.meet(node.node_id, node.epoch, node.role, node.address)
        except PeerRefusedError:
            return False
        except UnreachedError as error:
            return not error.gone
        return True

    async def _load_tokenizer(self, card: pb.ModelCard, address: str) -> None:
        """Load the tokenizer once for each model, of whichever node comes first."""
        if self._pinned is not None:
            return
        text = text_of(card)
        if self._loading is None or self._loading[0] != text:
            self._loading = text, asyncio.create_task(self._tokenizer_of(card, address))
        try:
            # Shielded from a join that times out, so that the next one finds it done.
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
    """The reason why a node's name and role cannot be shown; empty if they can."""
    if not 0 < len(request.node_id) <= MAX_NAME:
        return f"node_id must have 1 to {MAX_NAME} characters"
    # It is printed to an operator's terminal (``tandem nodes``), as the address is.
    if not request.node_id.isprintable():
        return "node_id must be printable"
    return "" if request.role in ROLES else "role must be prefill or decode"


def _printable(text: str) -> str:
    """A node's text, for logs and terminals."""
    return text if text.isprintable() else ascii(text)
