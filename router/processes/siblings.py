"""The other workers of a router, as routes see them: none, in a router of one process."""

from __future__ import annotations

from collections.abc import Callable

from ...proto import tandem_pb2 as pb
from ..access.key_usage import KeyCounts
from ..cluster.node_commands import NodeCommands
from ..metrics import Metrics
from ..web.overview import WorkerShare


class Siblings:
    """``active`` are the requests in progress at other workers; ``whole`` is true if all workers
    serve. A worker has a subclass that asks its keeper."""

    active: int = 0
    whole: bool = True

    def __init__(
        self,
        commands: NodeCommands,
        metrics: Metrics,
        usage: Callable[[], dict[str, KeyCounts]],
        share: Callable[[], WorkerShare],
    ) -> None:
        self._commands = commands
        self._metrics = metrics
        self._usage = usage
        self._share = share

    async def drain(self, node_id: str, seconds: float | None) -> None:
        """Drain a node. Raises ``RequestError``."""
        self._commands.drain(node_id, seconds)

    async def set_role(self, node_id: str, role: pb.Role, *, force: bool) -> None:
        """Change the role of a node. Raises ``RequestError``."""
        self._commands.set_role(node_id, role, force=force)

    async def usage(self) -> dict[str, KeyCounts]:
        """The counts of every key, at all workers."""
        return self._usage()

    async def shares(self) -> list[WorkerShare]:
        """The shares of all workers in the overview of the cluster."""
        return [self._share()]

    async def page(self) -> bytes:
        """The metrics of all workers."""
        return await self._metrics.page()
