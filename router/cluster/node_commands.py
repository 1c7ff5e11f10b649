"""An operator's commands to nodes, which are sent with the next heartbeat's reply."""

from __future__ import annotations

from math import inf

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ...shared.errors import RequestError
from ..options import RouterOptions
from .node import Node
from .node_table import NodeTable

MAX_NAME = 256


class UnknownNodeError(RequestError):
    """There is no node of this name."""


class NodeCommands:
    """Drains and role changes, through the registry and over HTTP."""

    def __init__(self, options: RouterOptions, nodes: NodeTable) -> None:
        self._options = options
        self._nodes = nodes

    def drain(self, node_id: str, seconds: float | None) -> None:
        """Drain a node, without a time limit if ``seconds`` is ``None``. Raises
        ``RequestError``."""
        node = self._find(node_id)
        if seconds is not None and not 0 <= seconds < inf:  # rejects NaN too
            raise RequestError(f"a drain's timeout must be seconds, not {seconds}")
        node.drain(seconds)

    def set_role(self, node_id: str, role: pb.Role, *, force: bool) -> None:
        """Make a node switch to ``role``. Raises ``RequestError``."""
        node = self._find(node_id)
        problem = self._role_problem(node, role, force)
        if problem:
            raise RequestError(problem)
        node.switch(role)

    def _find(self, node_id: str) -> Node:
        """The node to command. Raises ``RequestError`` if there is none, or if the router cannot
        send it commands."""
        node = self._nodes.find(node_id)
        if node is None:
            names = ", ".join(sorted(n.node_id for n in self._nodes)) or "none"
            message = f"no node is called {node_id[:MAX_NAME]!r}; the nodes are: {names}"
            raise UnknownNodeError(message)
        if node.address in self._options.prefill_addresses:
            raise RequestError(
                f"node {node.node_id} is one of --pd-url and sends this router no heartbeats; stop "
                f"it with SIGTERM, which drains it"
            )
        return node

    def _role_problem(self, node: Node, role: pb.Role, force: bool) -> str:
        if role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            return "a node's role is prefill or decode"
        if node.draining:
            return f"node {node.node_id} is draining; try again when it has rejoined"
        if node.role == role:
            return f"node {node.node_id} is already a {role_name(role)} node"
        others = any(n is not node and not n.is_prefill and not n.draining for n in self._nodes)
        if role == pb.ROLE_PREFILL and not others and not force:
            return (
                f"node {node.node_id} is the last decode node that takes work, and without it no "
                f"request could be served; start another one first, or add --force"
            )
        return ""
