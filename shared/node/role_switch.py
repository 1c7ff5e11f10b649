"""The roles that a node can play, and the change from one to the other while it runs.

Model, cache and ports belong to neither role: the services of both are registered from the start,
and the one whose turn it is not refuses. So a change takes as long as the running requests do, no
weights are loaded again, and what the prefix index holds is of use in the new role too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from ...proto import tandem_pb2 as pb

if TYPE_CHECKING:
    from .process import NodeProcess

POLL_SECONDS = 0.05


class NodeRole(Protocol):
    """What makes a head process a prefill node or a decode node."""

    role: pb.Role
    listens: bool  # its ranks accept data-plane connections

    def register(self, server: grpc.aio.Server, frame: NodeProcess) -> None:
        """Add the services, and remember the frame."""

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Loops that run as long as the node."""

    def admit(self) -> None:
        """Take new work again."""

    def drain(self) -> None:
        """Refuse new work."""

    @property
    def busy(self) -> bool:
        """Work is left that a drain waits for."""

    def cut_off(self) -> None:
        """End the work that is left, and say that the drain is over."""

    async def close(self) -> None:
        """Give back connections; it may have to open them again."""


class RoleSwitch:
    """All roles of one node, of which the first is played first."""

    def __init__(self, roles: Sequence[NodeRole]) -> None:
        self._roles = {role.role: role for role in roles}
        self._played = roles[0]
        self._ending = False

    @property
    def role(self) -> pb.Role:
        """The one that is played now."""
        return self._played.role

    @property
    def listens(self) -> bool:
        return any(role.listens for role in self._roles.values())

    @property
    def busy(self) -> bool:
        return any(role.busy for role in self._roles.values())

    def can_play(self, role: pb.Role) -> bool:
        return role in self._roles

    def register(self, server: grpc.aio.Server, frame: NodeProcess) -> None:
        for role in self._roles.values():
            role.register(server, frame)
            if role is not self._played:
                role.drain()

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [loop for role in self._roles.values() for loop in role.background()]

    def drain(self) -> None:
        """Refuse new work in every role, for good."""
        self._ending = True
        for role in self._roles.values():
            role.drain()

    def cut_off(self) -> None:
        """End the work that is left, in every role."""
        for role in self._roles.values():
            role.cut_off()

    async def change(self, role: pb.Role) -> None:
        """Refuse new work, finish what runs, and take work in the other role.

        There is no deadline, because no request may be lost: each of them has its own.
        """
        self._played.drain()
        while self._played.busy:  # noqa: ASYNC110 - requests end in many places, changes are rare
            await asyncio.sleep(POLL_SECONDS)
        await self._played.close()
        self._played = self._roles[role]
        if not self._ending:
            self._played.admit()

    async def close(self) -> None:
        for role in self._roles.values():
            await role.close()
